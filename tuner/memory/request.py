"""What a dry run is asked: one rank of one candidate, as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

LOCAL = "local"
TRANSFORMER_ENGINE = "transformer_engine"


@dataclass(frozen=True, slots=True)
class DryRunRequest:
    """One rank of one candidate.

    `model` and `config` are flat mappings of Megatron-Core field names, as in `TrialSpec`. `layers`
    says whose layers run: "transformer_engine" (a CUDA device, layers that keep what Transformer
    Engine of version `te_version` keeps) or "local" (the layers that real runs on a CPU use, with
    every tensor counted). `architecture` is that of the GPU. With
    `boundaries` the trace carries markers between the units of the model.
    """

    model: Mapping[str, Any]
    config: Mapping[str, Any]
    world_size: int
    seq_length: int
    global_batch_size: int
    rank: int
    precision: str = "bf16"
    layers: str = TRANSFORMER_ENGINE
    te_version: str = "2.9.0"
    architecture: str = "hopper"
    steps: int = 2
    boundaries: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def optimizer_shards(self) -> tuple[float, float]:
        """Ranks that share the update of dense and of expert parameters."""
        config = self.config
        if not config.get("use_distributed_optimizer"):
            return 1.0, 1.0
        tensor = int(config.get("tensor_model_parallel_size") or 1)
        experts = int(config.get("expert_tensor_parallel_size") or tensor)
        experts *= int(config.get("expert_model_parallel_size") or 1)
        return self.world_size / tensor, self.world_size / experts

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> DryRunRequest:
        return cls(**data)
