"""Bytes that CUDA graphs of whole layers hold beyond what the same eager step does.

Megatron-Core gives each captured layer, for each micro-batch in flight, static inputs of its own
(transformer/transformer_layer.py `get_layer_static_inputs`, 0.16 to 0.19): the hidden states, which
eager layers share with their neighbour's output, and a mask for attention. Graphs of parts of a
layer stay below the peak of the eager steps before the capture, and those of a whole step hold in
their pool what the eager step holds: full dry runs show both.
"""

from __future__ import annotations

from tuner.candidate import Candidate
from tuner.models import ModelSpec

_ATTENTION, _MLP = "attn", "mlp"


def captures_layers(implementation: str, modules: tuple[str, ...]) -> bool:
    """Whether such graphs hold whole layers."""
    whole = not modules or {_ATTENTION, _MLP} <= set(modules)
    return implementation == "transformer_engine" and whole


def layer_input_bytes(model: ModelSpec, setting: Candidate, seq_length: int) -> int:
    """Bytes of the static inputs of one captured layer and micro-batch."""
    rows = setting.micro_batch_size * seq_length // setting.context_parallel_size
    shards = setting.tensor_model_parallel_size if setting.sequence_parallel else 1
    return rows * (seq_length + 2 * model.hidden_size // shards)
