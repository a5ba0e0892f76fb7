"""The study behind Ray Tune's `Searcher` interface.

Ray asks for the next trial and reports each ending. A trial is handed to Ray once it has its nodes;
until then it waits in the dispatcher's line. Endings go to the study, then to MLflow and to the
progress display. The trial budget counts candidates: running one again costs none.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ray.tune.search import Searcher, SearchGenerator

from trainables.progress import HANG_MULTIPLE
from tuner.candidate import Candidate
from tuner.cluster.attempts import keep_attempt
from tuner.cluster.dispatcher import Dispatcher, Flight
from tuner.cluster.placement import Placement
from tuner.cluster.proposals import START_S
from tuner.cluster.trial_actor import RESULT_KEY
from tuner.job import Budget
from tuner.measurement import Outcome, TrialResult, TrialSpec
from tuner.search.records import Proposal, TrialRecord
from tuner.search.study import TuningStudy

OnStart = Callable[[Proposal], None]
OnEnd = Callable[[TrialRecord], None]


@dataclass(frozen=True, slots=True)
class TrialPlan:
    """How a candidate becomes a trial: its spec, its placement and its folder.

    `placement` is that of every candidate where all are of one size, else None.
    """

    spec_of: Callable[[Candidate], TrialSpec]
    placement_of: Callable[[Candidate], Placement]
    folder_of: Callable[[int], str]
    placement: Placement | None
    hang_after_s: float


@dataclass(frozen=True, slots=True)
class Limits:
    """`trials` to launch, `concurrent` at once; `lookahead` may wait; see `StudySearcher`."""

    trials: int
    concurrent: int | None
    lookahead: int
    race: bool


class StudySearch(SearchGenerator):
    """A searcher as Tune drives it, without files of Tune's own.

    Tune copies the searcher's state files in a background thread while it replaces them; the copy
    fails when it meets a temporary one. The study's storage makes those files superfluous.
    """

    def save_to_dir(self, dirpath: str, session_str: str = "", **kwargs: Any) -> None:
        """Nothing to save."""


class StudySearcher(Searcher):
    """Hands the study's proposals to Ray Tune as nodes come free, within a budget.

    Candidates of one size are proposed when there is room for one, so each proposal knows every
    result; candidates of many sizes a few ahead, so that small ones fill the gaps large ones leave.
    With `race`, a trial is told the step time to beat.
    """

    def __init__(
        self,
        study: TuningStudy,
        plan: TrialPlan,
        budget: Budget,
        dispatcher: Dispatcher,
        limits: Limits,
        *,
        seats_json: Callable[[Any], list[dict[str, Any]]],
        on_start: OnStart,
        on_end: OnEnd,
    ) -> None:
        super().__init__(metric="done", mode="max")
        self._study = study
        self._plan = plan
        self._budget = budget
        self._dispatcher = dispatcher
        self._limits = limits
        self._left = limits.trials
        seconds = budget.wall_clock_s
        self._deadline = None if seconds is None else time.monotonic() + seconds
        self._seats_json = seats_json
        self._on_start, self._on_end = on_start, on_end
        self._flights: dict[str, Flight] = {}
        self._longest_s: dict[int, float] = {}
        self._ended = False
        self.ended_because = "budget spent"

    def set_search_properties(
        self, metric: str | None, mode: str | None, config: dict[str, Any], **spec: Any
    ) -> bool:
        return True

    def suggest(self, trial_id: str) -> Any:
        concurrent = self._limits.concurrent
        if concurrent is not None and self._dispatcher.running >= concurrent:
            return None
        flight = self._dispatcher.next()
        if flight is None and self._propose():
            flight = self._dispatcher.next()
        if flight is not None:
            return self._launch(trial_id, flight)
        if self._dispatcher.running:
            return None
        if self._dispatcher.waiting:
            self._give_up()
            return None
        return Searcher.FINISHED if self._ended else None

    def _propose(self) -> bool:
        """Put a proposal in line where one is wanted; whether there was one.

        One at a time: endings that came in while it was made are heard before the next is.
        """
        if self._ended or not self._wants_more():
            return False
        spent = "budget spent" if self._left <= 0 else self._spent()
        proposal = None if spent is not None else self._study.ask()
        if proposal is None:
            self._end(spent or "the space has no other valid candidate")
            return False
        self._left -= 1
        placement = self._plan.placement_of(proposal.candidate)
        self._dispatcher.submit(Flight(proposal, placement, self._expected_s(proposal)))
        return True

    def _wants_more(self) -> bool:
        if self._plan.placement is None:
            return self._dispatcher.waiting < max(1, self._limits.lookahead)
        if self._dispatcher.has_room(self._plan.placement):
            return True
        return not self._dispatcher.running and not self._dispatcher.waiting

    def _launch(self, trial_id: str, flight: Flight) -> dict[str, Any]:
        number = flight.proposal.number
        folder = self._plan.folder_of(number)
        if flight.attempts:
            keep_attempt(Path(folder), len(flight.attempts))
        else:
            self._on_start(flight.proposal)
        self._flights[trial_id] = flight
        return {
            "number": number,
            "spec": self._spec(flight),
            "seats": self._seats_json(flight.seats),
            "output_dir": folder,
            "assigned_at": time.time(),
        }

    def _give_up(self) -> None:
        """Nothing runs and nobody in line fits: the nodes for it are gone."""
        for flight, result in self._dispatcher.give_up():
            number = flight.proposal.number
            if not flight.attempts:
                self._on_start(flight.proposal)
            self._on_end(self._study.tell(number, result))
            self._end("no usable nodes are left")

    def _end(self, reason: str) -> None:
        if not self._ended:
            self._ended, self.ended_because = True, reason

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

    def _expected_s(self, proposal: Proposal) -> float:
        """How long the trial should take, to plan who may overtake whom; at most its timeout.

        Without an estimate: as long as the longest that completed, of its size where there is one.
        """
        spec = self._plan.spec_of(proposal.candidate)
        step_time_s = (proposal.expected or {}).get("step_time_s")
        if step_time_s is None:
            longest = max(self._longest_s.values(), default=spec.timeout_s)
            return self._longest_s.get(spec.world_size, longest)
        steps = spec.warmup_steps + spec.measure_steps
        return min(spec.timeout_s, START_S + steps * float(step_time_s))

    def _spec(self, flight: Flight) -> dict[str, Any]:
        plan, candidate = self._plan, flight.proposal.candidate
        spec = plan.spec_of(candidate)
        step_time_s = float((flight.proposal.expected or {}).get("step_time_s") or 0.0)
        spec = replace(spec, hang_after_s=max(plan.hang_after_s, HANG_MULTIPLE * step_time_s))
        if flight.env:
            env = {**(spec.config.get("env") or {}), **flight.env}
            spec = replace(spec, config={**spec.config, "env": env})
        best = self._study.best() if self._limits.race else None
        if best is not None and best.measurement is not None:
            gpu_seconds = best.measurement.step_time_s * plan.spec_of(best.candidate).world_size
            spec = replace(spec, beat_step_time_s=gpu_seconds / spec.world_size)
        return asdict(spec)

    def on_trial_complete(
        self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False
    ) -> None:
        flight = self._flights.pop(trial_id, None)
        if flight is None:
            return
        died = error or not result or RESULT_KEY not in result
        if died:
            reached = TrialResult(Outcome.NODE_LOST, "the trial's Ray actor died")
        else:
            assert result is not None
            reached = TrialResult.from_json(json.loads(result[RESULT_KEY]))
        number = flight.proposal.number
        if reached.outcome is Outcome.COMPLETED:
            size = flight.placement.world_size
            self._longest_s[size] = max(reached.duration_s, self._longest_s.get(size, 0.0))
        reached = self._within_limit(flight.proposal, reached)
        ended, decision = self._dispatcher.ended(number, reached, died=died)
        if decision.stops:
            self._end(f"{ended.outcome}: {ended.reason}")
            self._dispatcher.drain()
        if not decision.again:
            self._on_end(self._study.tell(number, ended))

    def save(self, checkpoint_path: str) -> None:
        """Nothing to save: the study's storage is the record, written at every tell."""

    def restore(self, checkpoint_path: str) -> None:
        """See `save`."""

    def __getstate__(self) -> dict[str, Any]:
        """Empty: Tune pickles the searcher for its own way to resume, which studies do not use."""
        return {}

    def _within_limit(self, proposal: Proposal, ended: TrialResult) -> TrialResult:
        """A completed run above the job's memory limit is out of memory, whatever the device."""
        return within_limit(ended, self._plan.spec_of(proposal.candidate).memory_limit_bytes)


def within_limit(ended: TrialResult, limit_bytes: int | None) -> TrialResult:
    """`ended`, out of memory where it completed with a peak above the limit."""
    measured = ended.measurement
    if ended.outcome is not Outcome.COMPLETED or limit_bytes is None or measured is None:
        return ended
    if measured.peak_memory_allocated_bytes <= limit_bytes:
        return ended
    gib = measured.peak_memory_allocated_bytes / 2**30
    reason = f"peak {gib:.3f} GiB is above the limit of {limit_bytes / 2**30:.3f} GiB"
    return replace(ended, outcome=Outcome.OOM, reason=reason)
