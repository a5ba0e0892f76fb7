"""The study behind Ray Tune's `Searcher` interface.

Ray asks for the next trial and reports each ending; both go straight to the study, then to MLflow
and to the progress display. The trial budget counts launches only.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from ray.tune.search import ConcurrencyLimiter, Searcher, SearchGenerator

from tuner.candidate import Candidate
from tuner.cluster.placement import Placement
from tuner.cluster.trial_actor import RESULT_KEY
from tuner.job import Budget
from tuner.measurement import Outcome, TrialResult, TrialSpec
from tuner.search.records import Proposal, TrialRecord
from tuner.search.study import TuningStudy

OnStart = Callable[[Proposal], None]
OnEnd = Callable[[TrialRecord], None]


@dataclass(frozen=True, slots=True)
class TrialPlan:
    """How a candidate becomes a trial: its spec, its placement and its folder."""

    spec_of: Callable[[Candidate], TrialSpec]
    placement_of: Callable[[Candidate], Placement]
    folder_of: Callable[[int], str]
    trainable: str


class StudySearch(SearchGenerator):
    """A searcher as Tune drives it, without files of Tune's own.

    Tune copies the searcher's state files in a background thread while it replaces them; the copy
    fails when it meets a temporary one. The study's storage makes those files superfluous.
    """

    def __init__(self, searcher: Searcher, max_concurrent: int | None) -> None:
        limited = ConcurrencyLimiter(searcher, max_concurrent) if max_concurrent else searcher
        super().__init__(limited)

    def save_to_dir(self, dirpath: str, session_str: str = "", **kwargs: Any) -> None:
        """Nothing to save."""


class StudySearcher(Searcher):
    """Hands the study's proposals to Ray Tune, within a budget.

    `trials` counts launches. With `race`, a trial is told the step time to beat.
    """

    def __init__(
        self,
        study: TuningStudy,
        plan: TrialPlan,
        budget: Budget,
        *,
        trials: int,
        race: bool,
        on_start: OnStart,
        on_end: OnEnd,
    ) -> None:
        super().__init__(metric="done", mode="max")
        self._study = study
        self._plan = plan
        self._budget = budget
        self._left = trials
        self._race = race
        seconds = budget.wall_clock_s
        self._deadline = None if seconds is None else time.monotonic() + seconds
        self._on_start, self._on_end = on_start, on_end
        self._running: dict[str, Proposal] = {}
        self.ended_because = "budget spent"

    def set_search_properties(
        self, metric: str | None, mode: str | None, config: dict[str, Any], **spec: Any
    ) -> bool:
        return True

    def suggest(self, trial_id: str) -> Any:
        if self._left <= 0:
            return Searcher.FINISHED
        spent = self._spent()
        if spent is not None:
            self.ended_because = spent
            return Searcher.FINISHED
        proposal = self._study.ask()
        if proposal is None:
            self.ended_because = "the space has no other valid candidate"
            return Searcher.FINISHED
        self._left -= 1
        self._running[trial_id] = proposal
        self._on_start(proposal)
        placement = self._plan.placement_of(proposal.candidate)
        return {
            "number": proposal.number,
            "spec": self._spec(proposal.candidate),
            "trainable": self._plan.trainable,
            "ranks_per_node": list(placement.ranks),
            "bundles": placement.bundles,
            "strategy": placement.strategy,
            "output_dir": self._plan.folder_of(proposal.number),
        }

    def _spent(self) -> str | None:
        """Why no further trial starts, apart from the number of trials; None where one may."""
        if self._deadline is not None and time.monotonic() > self._deadline:
            return "wall-clock budget spent"
        if self._budget.gpu_hours is not None:
            used = sum(
                record.duration_s * self._plan.spec_of(record.candidate).world_size
                for record in self._study.records()
            )
            if used > 3600 * self._budget.gpu_hours:
                return "GPU-hour budget spent"
        if self._budget.stop_when_unlikely and self._study.better_is_unlikely():
            return "a better candidate is unlikely"
        return None

    def _spec(self, candidate: Candidate) -> dict[str, Any]:
        spec = self._plan.spec_of(candidate)
        best = self._study.best() if self._race else None
        if best is not None and best.measurement is not None:
            gpu_seconds = (
                best.measurement.step_time_s * self._plan.spec_of(best.candidate).world_size
            )
            spec = replace(spec, beat_step_time_s=gpu_seconds / spec.world_size)
        return asdict(spec)

    def on_trial_complete(
        self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False
    ) -> None:
        proposal = self._running.pop(trial_id, None)
        if proposal is None:
            return
        if error or not result or RESULT_KEY not in result:
            ended = TrialResult(Outcome.CRASHED, "the trial's Ray actor died (see the Ray logs)")
        else:
            ended = TrialResult.from_json(json.loads(result[RESULT_KEY]))
        self._on_end(self._study.tell(proposal.number, self._within_limit(proposal, ended)))

    def save(self, checkpoint_path: str) -> None:
        """Nothing to save: the study's storage is the record, written at every tell."""

    def restore(self, checkpoint_path: str) -> None:
        """See `save`."""

    def __getstate__(self) -> dict[str, Any]:
        """Empty: Tune pickles the searcher for its own way to resume, which studies do not use."""
        return {}

    def _within_limit(self, proposal: Proposal, ended: TrialResult) -> TrialResult:
        """A completed run above the job's memory limit is out of memory, whatever the device."""
        limit = self._plan.spec_of(proposal.candidate).memory_limit_bytes
        measured = ended.measurement
        if ended.outcome is not Outcome.COMPLETED or limit is None or measured is None:
            return ended
        if measured.peak_memory_allocated_bytes <= limit:
            return ended
        gib = measured.peak_memory_allocated_bytes / 2**30
        reason = f"peak {gib:.3f} GiB is above the limit of {limit / 2**30:.3f} GiB"
        return replace(ended, outcome=Outcome.OOM, reason=reason)
