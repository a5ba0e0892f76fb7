"""A candidate on its way through the stages."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from constraint_oracle import values

#: Keys of a candidate that are no field of any configuration class.
RUN_KEYS = frozenset(
    (
        "world_size",
        "micro_batch_size",
        "global_batch_size",
        "seq_length",
        "vocab_size",
        "env",
        "te_version",
        "gpu",
        "comm_overlap",
        "mixed_precision",
        "use_megatron_fsdp",
        "use_torch_fsdp2",
        "ckpt_format",
        "order",
        "decrease_batch_size_if_needed",
        "decoupled_weight_decay",
        "check_for_nan_in_loss",
    )
)


def completed(config: Mapping[str, Any]) -> dict[str, Any]:
    """A candidate that leaves out its world or its batch gets the smallest that fits its layout.

    So only what the other fields say by themselves is judged.
    """

    def size(name: str, default: int = 1) -> int:
        value = config.get(name)
        return value if isinstance(value, int) and value > 0 else default

    tensor, stages = size("tensor_model_parallel_size"), size("pipeline_model_parallel_size")
    context = size("context_parallel_size")
    dense = size("tensor_parallel_num_weight_shards", tensor) * stages * context
    expert_tensor = size("expert_tensor_parallel_size", tensor)
    expert = size("expert_tensor_parallel_num_weight_shards", expert_tensor) * stages
    expert *= size("expert_model_parallel_size")
    world = math.lcm(dense, expert) * size("num_distributed_optimizer_instances")
    complete = dict(config)
    if complete.get("world_size") is None:
        complete["world_size"] = world
    if complete.get("micro_batch_size") is None:
        complete["micro_batch_size"] = 1
    if complete.get("global_batch_size") is None:
        group = size("microbatch_group_size_per_vp_stage", stages)
        ranks = max(1, complete["world_size"] // dense)
        complete["global_batch_size"] = complete["micro_batch_size"] * ranks * stages * group
    return complete


class Candidate:
    """One candidate with the configuration objects the stages make of it."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = completed(config)
        self.env: dict[str, str] = {k: str(v) for k, v in (config.get("env") or {}).items()}
        self.model: Any = None
        self.ddp: Any = None
        self.optimizer: Any = None
        self.num_microbatches = 1

    def rewritten(self) -> dict[str, list[Any]]:
        """Fields the candidate sets and the package holds otherwise: ``{field: [given, held]}``."""
        changed = values.changes(self.config, self.model)
        held = values.changes(self.config, self.ddp)
        return changed | {f"ddp.{name}": pair for name, pair in held.items()}

    def get(self, key: str, default: Any = None) -> Any:
        value = self.config.get(key, default)
        return default if value is None else value


def field_names(cls: type) -> frozenset[str]:
    return frozenset(one.name for one in dataclasses.fields(cls))
