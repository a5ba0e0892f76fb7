"""What a warm start has done before a trial: the imports of a rank, without touching CUDA."""

from __future__ import annotations

import importlib.util


def preload(device: str) -> None:
    """Import what `run_rank` and its launcher import on this device ("cpu" or "cuda")."""
    import torch.distributed.elastic.multiprocessing.errors

    if device == "cpu":
        torch.set_num_threads(1)
        from trainables.megatron_core.cpu_device import without_compilation

        with without_compilation():
            import megatron.core.models.gpt
            import megatron.core.optimizer
    else:
        if importlib.util.find_spec("transformer_engine") is not None:
            import transformer_engine.pytorch  # noqa: F401
        import megatron.core.models.gpt
        import megatron.core.optimizer  # noqa: F401
    import trainables.megatron_core.model
    import trainables.megatron_core.plan
    import trainables.megatron_core.processes
    import trainables.megatron_core.rank
    import trainables.megatron_core.report
    import trainables.megatron_core.schedule  # noqa: F401
