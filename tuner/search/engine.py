"""Proposals for a study from its pool of candidates: the sampler "residual"."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

from tuner.candidate import Candidate
from tuner.measurement import Outcome
from tuner.search.acquisition import Goal
from tuner.search.estimates import Estimates, Estimator
from tuner.search.knowledge import Knowledge, Seen
from tuner.search.pool import Pool
from tuner.search.proposer import Choice, Proposer
from tuner.search.records import TrialRecord
from tuner.search.stopping import chance_of_improvement
from tuner.search.table import CandidateTable


@dataclass(frozen=True, slots=True)
class TrialCosts:
    """What trials take: GPUs of a candidate's, seconds besides its steps, number of steps."""

    world_size_of: Callable[[Candidate], int]
    overhead_s: float = 60.0
    steps: int = 5


class Engine:
    """Chooses among the candidates of a space, told of every trial of the study.

    `candidates` are the valid ones; `limit_bytes` is the memory a rank may allocate, as
    `estimator` counts it. `estimates` are those of `candidates`, where they are at hand.
    """

    def __init__(
        self,
        candidates: Iterable[Candidate],
        estimator: Estimator,
        *,
        limit_bytes: float,
        costs: TrialCosts,
        estimates: Estimates | None = None,
        goal: Goal | None = None,
    ) -> None:
        self._candidates = {candidate.key: candidate for candidate in candidates}
        self._estimator = estimator
        self._estimates = estimates
        self._limit_bytes = limit_bytes
        self._costs = costs
        self._goal = goal
        self._refused: dict[str, None] = {}
        self._seen: dict[int, Seen] = {}
        self._ended: list[TrialRecord] = []  # the study's first trials, as far as all have ended
        self._told: list[Seen] = []  # what these showed

    @cached_property
    def _proposer(self) -> Proposer:
        candidates = list(self._candidates.values())
        estimates, self._estimates = self._estimates, None
        if estimates is None or len(estimates) != len(candidates):
            estimates = self._estimator(candidates)
        pool = Pool(
            CandidateTable.of(candidates),
            estimates,
            self._limit_bytes,
            [self._costs.world_size_of(candidate) for candidate in candidates],
            self._costs.overhead_s,
            self._costs.steps,
        )
        return Proposer(pool, self._goal)

    def reestimate(self, estimator: Estimator) -> None:
        """Take estimates from here on; what trials showed is compared with these."""
        self._estimator, self._estimates = estimator, None
        self._forget()

    def propose(self, records: Sequence[TrialRecord]) -> tuple[Candidate, Choice] | None:
        """The next candidate and what is expected of it; None when none is left."""
        if not self._candidates:
            return None
        seen, running = self._trials(records)
        choice = self._proposer.choose(seen, running)
        if choice is None:
            return None
        return self._proposer.pool.table.candidates[choice.row], choice

    def know(self, records: Sequence[TrialRecord]) -> Knowledge:
        """What is known of every candidate of the pool after these trials."""
        return self._proposer.know(*self._trials(records))

    @property
    def pool(self) -> Pool:
        """The candidates and their estimates."""
        return self._proposer.pool

    @property
    def goal(self) -> Goal:
        """What is searched for."""
        return self._goal or Goal()

    @property
    def proposer(self) -> Proposer:
        return self._proposer

    def chance_of_improvement(self, records: Sequence[TrialRecord]) -> float:
        """The probability that a candidate left is worth a trial (`stopping`)."""
        if not self._candidates:
            return 0.0
        seen, running = self._trials(records)
        return chance_of_improvement(self._proposer, seen, running)

    def refuse(self, candidate: Candidate) -> None:
        """Never propose this candidate (the rules reject it, or it counts as another)."""
        self._refused[candidate.key] = None

    def _trials(self, records: Sequence[TrialRecord]) -> tuple[list[Seen], list[int]]:
        """Finished trials and running ones by row; candidates new to the pool are taken in."""
        if list(records[: len(self._ended)]) != self._ended:
            self._ended, self._told = [], []
        later = records[len(self._ended) :]
        strangers = {r.candidate.key: r.candidate for r in later}
        strangers = {k: c for k, c in strangers.items() if k not in self._candidates}
        if strangers:
            self._candidates.update(strangers)
            self._forget()
            later = records
        rows = self._proposer.pool.table.rows
        seen: list[Seen] = []
        running: list[int] = []
        for record in later:
            if record.running:
                running.append(rows[record.candidate.key])
            elif record.outcome != Outcome.INTERRUPTED.value:
                if record.number not in self._seen:
                    self._seen[record.number] = _seen_of(record, rows[record.candidate.key])
                seen.append(self._seen[record.number])
            if not running:
                self._ended.append(record)
                self._told += seen
                seen.clear()
        told = [*self._told, *seen]
        told += [self._refusal(rows[key]) for key in self._refused if key in rows]
        return told, running

    def _forget(self) -> None:
        """Take nothing from the pool as it was: it has changed."""
        self.__dict__.pop("_proposer", None)
        self._seen.clear()
        self._ended, self._told = [], []

    @staticmethod
    @cache
    def _refusal(row: int) -> Seen:
        return Seen(row, None, None, None)


def _seen_of(record: TrialRecord, row: int) -> Seen:
    measured = record.measurement
    fits = {Outcome.COMPLETED.value: True, Outcome.OOM.value: False}.get(record.outcome)
    if measured is None:
        return Seen(row, None, None, fits)
    return Seen(row, measured.step_time_s, measured.peak_memory_allocated_bytes, fits)


def expectation(choice: Choice) -> dict[str, Any]:
    """A choice as plain data, for the study's record."""
    return {
        "step_time_s": choice.step_time_s,
        "spread": choice.spread,
        "memory_bytes": choice.memory_bytes,
        "fit_probability": choice.fit_probability,
        "improvement": choice.improvement,
        "reason": choice.reason,
    }
