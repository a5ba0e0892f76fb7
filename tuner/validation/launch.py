"""What was launched, in the tuner's terms: the form every published row is brought into."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


class UnmodelledError(Exception):
    """A published run that the estimate does not cover; the message is the reason."""


@dataclass(frozen=True, slots=True)
class Launch:
    """One training run: the model, the candidate and the shape of its batches.

    `model` and `config` are flat mappings of Megatron-Core field names. `precision` is "bf16",
    "fp16" or "fp32"; FP8 and FP4 recipes stand in `config` (`fp8`, `fp8_recipe`, ...).
    `framework` holds the settings of a run on another framework than Megatron-Core, which has a dry
    run of its own; `assumptions` lists what was not published and how it was filled in.
    """

    model: Mapping[str, Any]
    config: Mapping[str, Any]
    world_size: int
    seq_length: int
    global_batch_size: int
    gpu: str
    precision: str = "bf16"
    gpus_per_node: int = 8
    link_domain_gpus: int | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    te_version: str | None = None
    framework: Mapping[str, Any] | None = None
    assumptions: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The document `tuner estimate` takes."""
        document: dict[str, Any] = {
            "model": dict(self.model),
            "config": dict(self.config)
            | ({"env": dict(self.environment)} if self.environment else {}),
            "world_size": self.world_size,
            "seq_length": self.seq_length,
            "global_batch_size": self.global_batch_size,
            "gpu": self.gpu,
            "gpus_per_node": self.gpus_per_node,
            "precision": self.precision,
        }
        if self.te_version:
            document["te_version"] = self.te_version
        if self.framework:
            document["framework"] = dict(self.framework)
        return document
