"""The order in which practitioners try settings, for when nothing is known of a machine.

Megatron Bridge's guide to memory tuning: first the allocator (expandable segments), then the
narrowest recomputation that the architecture offers, wider ones only when needed, full
recomputation last, and offload only without a pipeline. The order below counts the cost of each
step in that list; it ranks candidates where no estimate does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tuner.candidate import Candidate

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_MODULE_STEPS = {
    "core_attn": 1,
    "layernorm": 2,
    "moe_act": 2,
    "mla_up_proj": 2,
    "shared_experts": 3,
    "mlp": 4,
    "moe": 5,
}
_FULL_STEPS = 8
_NOTHING_STEPS = 1  # selective recomputation of no module is a longer way to say none
_STEP = 0.03  # log units of step time for one step further down the guide
ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"


def guide_steps(candidate: Candidate) -> int:
    """How far down the guide a candidate stands; 0 is tried first."""
    steps = 0
    if candidate.recompute_granularity == "full":
        steps += _FULL_STEPS
    elif candidate.recompute_granularity == "selective":
        modules = candidate.recompute_modules
        steps += sum(_MODULE_STEPS.get(module, 4) for module in modules) or _NOTHING_STEPS
    offloads = candidate.cpu_offloading or candidate.fine_grained_activation_offloading
    if offloads:
        steps += 3 if candidate.pipeline_model_parallel_size == 1 else 6
    if candidate.optimizer_cpu_offload:
        steps += 6
    if "expandable_segments:True" not in dict(candidate.env).get(ALLOCATOR, ""):
        steps += 1
    return steps


def guided_log_time(candidates: Sequence[Candidate]) -> NDArray[np.float64]:
    """A prior mean of log step time that makes proposals follow the guide."""
    import numpy as np

    return _STEP * np.array([guide_steps(c) for c in candidates], dtype=np.float64)


def control_of(candidate: Candidate) -> Candidate | None:
    """The same run without recomputation, or None where it has none."""
    if candidate.recompute_granularity is None:
        return None
    kept = {k: v for k, v in candidate.to_flat().items() if k not in _RECOMPUTE_FIELDS}
    return Candidate.from_flat({**kept, "recompute_granularity": None})


_RECOMPUTE_FIELDS = (
    "recompute_granularity",
    "recompute_method",
    "recompute_num_layers",
    "recompute_modules",
    "distribute_saved_activations",
)
