"""What a run of the framework is launched with."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

TORCH, FUSED, FLASH_1, FLASH_2 = "torch", "fused", "flash1", "flash2"
"""Attention: eager PyTorch, one masked-softmax kernel, flash-attn 1 and 2."""


@dataclass(frozen=True, slots=True)
class ScalingRun:
    """A model, its layout and its kernels. Sizes count elements; `batch` is a micro-batch."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    vocabulary: int
    sequence: int
    batch: int
    tensor_ranks: int
    stages: int
    data_ranks: int
    micro_batches: int
    attention: str = FLASH_2
    fused_norm: bool = False
    checkpoint_layers: bool = False
    sequence_parallel: bool = False

    @property
    def shard_length(self) -> int:
        """Tokens of a sequence that one rank holds between the parallel regions."""
        return self.sequence // (self.tensor_ranks if self.sequence_parallel else 1)

    def to_json(self) -> dict[str, Any]:
        """The fields, as `ScalingRun(**fields)` takes them."""
        return asdict(self)
