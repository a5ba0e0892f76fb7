"""What runs a trial for real. A trainable is declared in `_TRAINABLES` and found by `get`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from tuner.measurement import TrialResult, TrialSpec


@dataclass(frozen=True, slots=True)
class Trainable:
    """A program that runs trials.

    `rank_module` is started once per rank as `python -m rank_module --spec FILE --output DIR`; it
    reads a `TrialSpec` and rank 0 writes the `TrialResult`. `frontend` says whose rules decide
    whether a candidate may run: those of `mcore`, `bridge` or `megatron-lm`. `preload` names a
    module whose `preload(device)` does the imports of a rank, for warm starts (`trainables.warm`).
    """

    name: str
    rank_module: str
    frontend: str = "mcore"
    preload: str | None = None

    def run_trial(self, spec: TrialSpec, output_dir: Path, **placement: Any) -> TrialResult:
        """Run one trial; arguments and result are those of `trainables.launch.run_trial`."""
        from trainables.launch import run_trial

        # A command that starts the ranks of a node itself is run once per node.
        processes = 1 if spec.options.get("per") == "node" else None
        return run_trial(
            spec, output_dir, module=self.rank_module, processes_per_node=processes, **placement
        )


class _Simulated(Trainable):
    """Runs no ranks: see `trainables.simulated`."""

    def run_trial(self, spec: TrialSpec, output_dir: Path, **placement: Any) -> TrialResult:
        from trainables.simulated import run_simulated

        return run_simulated(spec, output_dir, **placement)


_TRAINABLES = (
    Trainable(
        "megatron_core", "trainables.megatron_core", preload="trainables.megatron_core.preload"
    ),
    Trainable("megatron_bridge", "trainables.megatron_bridge", frontend="bridge"),
    Trainable("command", "trainables.command"),
    _Simulated("simulated", ""),
)


def names() -> tuple[str, ...]:
    """Names of all trainables."""
    return tuple(trainable.name for trainable in _TRAINABLES)


def get(name: str) -> Trainable:
    """The trainable called `name`; raises KeyError that lists the known ones."""
    for trainable in _TRAINABLES:
        if trainable.name == name:
            return trainable
    raise KeyError(f"trainable {name!r} is unknown; choose one of {', '.join(names())}")
