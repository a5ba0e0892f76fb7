"""How data-parallel ranks share a model: the wrapper of each model chunk.

As `get_model` and `validate_args` of Megatron-LM choose it: Megatron's own data parallelism,
Megatron-FSDP (`use_megatron_fsdp`) or PyTorch's FSDP2 (`use_torch_fsdp2`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

TORCH_FSDP2 = "use_torch_fsdp2"
"""No field of a Megatron-Core class: an option of training scripts."""


def wrapped_chunk(config: Any, ddp_config: Any, module: Any, *, first: bool, fsdp2: bool) -> Any:
    """`module`, one model chunk of this rank, ready to be trained over data-parallel ranks.

    As Megatron-LM: gradients of chunks after the `first` are reduced while others compute.
    """
    common = {
        "config": config,
        "ddp_config": ddp_config,
        "module": module,
        "disable_bucketing": not first,
    }
    if fsdp2:
        from megatron.core.distributed import TorchFullyShardedDataParallel

        return TorchFullyShardedDataParallel(**common)
    if ddp_config.use_megatron_fsdp:
        from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel

        return FullyShardedDataParallel(**common, device=_current_device())
    from megatron.core.distributed import DistributedDataParallel

    return DistributedDataParallel(**common)


def _current_device() -> Any:
    import torch

    device: Any = torch.cuda.current_device()
    return torch.device("cuda", device) if isinstance(device, int) else device


def implied_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Settings that a kind of sharding brings along, as `validate_args` sets them."""
    if fields.get("use_megatron_fsdp"):
        return {"use_distributed_optimizer": True, "reuse_grad_buf_for_mxfp8_param_ag": False}
    return {}
