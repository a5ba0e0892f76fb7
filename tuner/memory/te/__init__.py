"""A stand-in for Transformer Engine that keeps what it keeps and computes nothing.

Megatron-Core's `extensions/transformer_engine.py` wraps the classes of the package
`transformer_engine`. `installed()` puts modules of that name in its place whose layers allocate,
save for backward and free the same tensors as the real ones, on the meta device. So Megatron-Core
takes the very code paths it takes on a GPU, and no kernel is needed.

What is kept was read from Transformer Engine 2.9; differences of other versions stand where they
matter (`state.py`). Each module names the upstream file it follows.
"""

from tuner.memory.te.tree import installed

__all__ = ["installed"]
