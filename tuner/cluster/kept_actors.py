"""Keeps the Ray actors of ended trials for the next ones.

Tune keeps an ended trial's actor only where another trial waits for one at that moment. Trials
reach Tune once their nodes are free, so there hardly ever is, and every trial would start a process
that imports Ray Tune: seconds on an idle head node, far more on a busy one.
"""

from __future__ import annotations

from typing import Any

from ray.tune.schedulers import FIFOScheduler

_KEPT = 1_000_000


class KeepActors(FIFOScheduler):
    """First come, first served, with every actor kept until the study ends.

    There are never more actors than trials that once ran side by side. Where a version of Ray has
    no such cache (`_ObjectCache` of `TuneController`), actors are started anew.
    """

    def __init__(self) -> None:
        super().__init__()
        self._caches: list[Any] = []

    def on_trial_add(self, tune_controller: Any, trial: Any) -> None:
        controller = getattr(tune_controller, "_tune_controller", tune_controller)
        cache = getattr(controller, "_actor_cache", None)
        if cache is not None and not any(cache is known for known in self._caches):
            self._caches.append(cache)
            cache.increase_max(trial.placement_group_factory, _KEPT)

    def choose_trial_to_run(self, tune_controller: Any) -> None:
        """None: Tune then starts its waiting trials in order, without a look at every ended one."""
