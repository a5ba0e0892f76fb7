"""megatron-tuner: tunes Megatron-Core and Megatron Bridge training, memory against throughput.

The functions here mirror the commands: `check` decides a configuration with the rules, `estimate`
predicts its memory, `tune` runs a job's candidates for real and keeps the best one that fits,
`export` writes a configuration in the form a training job takes. Each is imported when first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tuner.api import check, estimate, export, plan, tune

__all__ = ["check", "estimate", "export", "plan", "tune"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from tuner import api

        return getattr(api, name)
    raise AttributeError(f"module 'tuner' has no attribute {name!r}")
