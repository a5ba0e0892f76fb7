"""The study: proposes candidates and remembers every trial, in any Optuna storage.

Each trial's candidate, outcome, reason and measurement stand in its user attributes, so a study
can be reopened, reported and resumed from its storage alone, and by several drivers at once.
States are used so that samplers learn the right thing:

- a candidate the rules reject is PRUNED, with the rule, and violates the constraint; it never
  leaves this module and counts against no budget;
- out of memory is COMPLETE with the excess as a violated constraint (samplers ignore failed
  trials, and would propose its neighbours again and again);
- a timeout and a hang are COMPLETE at an objective of zero; every other failure and an
  interruption FAIL.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tuner.candidate import Candidate
from tuner.measurement import Measurement, Outcome, TrialResult
from tuner.search.acquisition import THROUGHPUT
from tuner.search.engine import Engine, expectation
from tuner.search.records import (
    DUPLICATE,
    REJECTED,
    RUNNING,
    Checker,
    Proposal,
    Rejection,
    TrialRecord,
    best_of,
)
from tuner.search.samplers import NumberedChooser, draws_numbers, make_sampler, numbered
from tuner.search.space import SearchSpace
from tuner.search.stopping import UNLIKELY
from tuner.search.store import Entry, TrialStore, open_storage

if TYPE_CHECKING:
    pass

_REPEATS_BEFORE_LISTING = 4  # proposals in a row already seen before unseen ones are listed
_LISTED_AT_MOST = 20_000  # points of the space looked at when listing
_ASKS_AT_MOST = 2_000  # proposals in a row none of which can be launched
_COMPLETED_BEFORE_STOPPING = 3
_GIB = 2**30


class TuningStudy:
    """Ask for candidates, tell their results; any Optuna storage.

    `check` decides validity; `metric` names the Measurement field to maximise. With an `engine`
    proposals come from it, else from the Optuna study's own sampler. The same seed, space and
    results give the same proposals.
    """

    def __init__(
        self,
        store: TrialStore,
        space: SearchSpace,
        check: Checker,
        *,
        metric: str,
        memory_limit_bytes: int | None,
        seed: int,
        engine: Engine | None = None,
        numbers: bool = False,
    ) -> None:
        self._store = store
        self._space = space
        self._check = check
        self._metric = metric
        self._memory_limit_bytes = memory_limit_bytes
        self._random = random.Random(seed)
        self._engine = engine
        self._numbers = numbers
        self._unseen: list[dict[str, Any]] | None = None

    def enqueue(self, flat: Mapping[str, Any]) -> None:
        """Propose this flat candidate next. Raises InputError where it lies outside the space."""
        self._store.enqueue(self._params(Candidate.from_flat(flat).to_flat()))

    def ask(self) -> Proposal | None:
        """The next candidate to launch, or None when the space holds no other."""
        self._store.refresh()
        if self._engine is not None:
            proposal = self._ask_engine(self._engine)
            if proposal is not None or not self._store.queued:
                return proposal
        return self._ask_sampler()

    def _ask_engine(self, engine: Engine) -> Proposal | None:
        while not self._store.queued:
            found = engine.propose(self._store.records())
            if found is None:
                return None
            candidate, choice = found
            rejection = self._check(candidate)
            if rejection is not None:
                self._note_rejected(engine, candidate, rejection)
                continue
            expected = expectation(choice)
            number = self._start(candidate, {"expected": expected, "outcome": RUNNING})
            twin = self._store.earlier_twin(number)
            if twin is None:
                return Proposal(number, candidate, expected)
            self._set_aside(number, DUPLICATE, f"same run as trial {twin}")
        return self._ask_sampler()

    def _note_rejected(self, engine: Engine, candidate: Candidate, rejection: Rejection) -> None:
        engine.refuse(candidate)
        number = self._start(candidate, {"rule": rejection.rule, "outcome": RUNNING})
        self._set_aside(number, REJECTED, rejection.message)

    def _start(self, candidate: Candidate, attributes: Mapping[str, Any]) -> int:
        """Start the trial of a candidate that no sampler drew."""
        flat = candidate.to_flat()
        labels = self._space.labels(flat)
        return self._store.add(
            labels,
            self._space.distributions(labels),
            {"key": candidate.key, "candidate": flat, **attributes},
        )

    def _ask_sampler(self) -> Proposal | None:
        repeats = 0
        for _ in range(_ASKS_AT_MOST):
            trial = self._store.ask()
            chooser = NumberedChooser(trial) if self._numbers else trial
            candidate = Candidate.from_flat(self._space.suggest(chooser))
            earlier = self._store.settled_as(candidate.key)
            rejection = None if earlier is not None else self._check(candidate)
            attributes = {"key": candidate.key, "candidate": candidate.to_flat()}
            if rejection is not None:
                attributes["rule"] = rejection.rule
            else:
                attributes["outcome"] = RUNNING
            self._store.asked(trial, attributes)
            if rejection is not None:
                self._set_aside(trial.number, REJECTED, rejection.message)
                continue
            earlier = self._store.any_twin(trial.number) if earlier is None else earlier
            if earlier is None:
                return Proposal(trial.number, candidate)
            self._set_aside(trial.number, DUPLICATE, f"same run as trial {earlier}")
            repeats += 1
            if repeats >= _REPEATS_BEFORE_LISTING and not self._enqueue_unseen():
                return None
        return None

    def tell(self, number: int, result: TrialResult) -> TrialRecord:
        """Record how trial `number` ended. Raises ValueError where it is not running."""
        from optuna.trial import TrialState

        measured = result.measurement
        attributes = {
            "outcome": result.outcome.value,
            "reason": result.reason,
            "duration_s": result.duration_s,
            "measurement": None if measured is None else measured.to_json(),
            "evidence": dict(result.evidence),
        }
        value = 0.0 if measured is None else float(getattr(measured, self._metric))
        if result.outcome is Outcome.COMPLETED and measured is not None:
            self._store.finish(number, attributes, values=[value], constraints={"memory": 0.0})
        elif result.outcome is Outcome.OOM:
            excess = {"memory": self._excess_gib(measured)}
            self._store.finish(number, attributes, values=[value], constraints=excess)
        elif result.outcome in (Outcome.TIMEOUT, Outcome.HUNG):
            self._store.finish(number, attributes, values=[0.0])
        else:
            self._store.finish(number, attributes, state=TrialState.FAIL)
        record = self._store.record(number)
        assert record is not None
        return record

    def interrupt_running(self, reason: str, *, requeue: bool) -> list[int]:
        """End every trial still marked running as interrupted; with `requeue` propose it again.

        A trial whose end was noted before its driver was killed ends as it was noted. One that was
        killed before its candidate was noted never ran: what was asked for is asked for again.
        """
        from optuna.trial import TrialState

        self._store.refresh()
        numbers = []
        for entry in self._store.entries():
            if entry.finished or entry.waiting:
                continue
            if entry.outcome not in (None, RUNNING):
                self._end_as_noted(entry)
                continue
            if entry.key is None:
                self._store.finish(entry.number, {"reason": reason}, state=TrialState.FAIL)
                if entry.asked_for:
                    self._store.enqueue(entry.params)
                continue
            self.tell(entry.number, TrialResult(Outcome.INTERRUPTED, reason))
            if requeue and entry.outcome == RUNNING:
                self._store.enqueue(entry.params)
            numbers.append(entry.number)
        return numbers

    def _end_as_noted(self, entry: Entry) -> None:
        noted = entry.attributes
        if entry.outcome in (REJECTED, DUPLICATE):
            self._set_aside(entry.number, str(entry.outcome), noted.get("reason", ""))
        else:
            self.tell(entry.number, TrialResult.from_json(noted))

    def requeue_interrupted(self) -> int:
        """Propose again the interrupted candidates that no later trial has run; how many."""
        self._store.refresh()
        waiting = {
            entry.key: entry.params
            for entry in self._store.entries()
            if entry.outcome == Outcome.INTERRUPTED.value and entry.key is not None
        }
        fresh = [params for key, params in waiting.items() if self._store.settled_as(key) is None]
        for params in fresh:
            self._store.enqueue(params)
        return len(fresh)

    def records(self) -> list[TrialRecord]:
        """Every launched trial, in order (rejected and repeated proposals are not trials)."""
        self._store.refresh()
        return self._store.records()

    def rejected(self) -> dict[str, int]:
        """How many proposals each rule rejected, by rule id."""
        rules = (entry.attributes.get("rule") for entry in self._store.entries())
        return dict(Counter(rule for rule in rules if rule is not None))

    def best(self) -> TrialRecord | None:
        """The feasible trial with the best metric; the earlier one of equals."""
        return best_of(self.records(), self._metric)

    def better_is_unlikely(self) -> bool:
        """Whether the engine gives a better candidate little chance, after some trials have run."""
        if self._engine is None or self._engine.goal.kind != THROUGHPUT or self._store.queued:
            return False
        records = self.records()
        if sum(record.feasible for record in records) < _COMPLETED_BEFORE_STOPPING:
            return False
        return self._engine.chance_of_improvement(records) < UNLIKELY

    @property
    def engine(self) -> Engine | None:
        """What proposes, where it is not an Optuna sampler."""
        return self._engine

    def _params(self, flat: Mapping[str, Any]) -> dict[str, Any]:
        """The parameters under which the study's sampler finds a flat candidate."""
        labels = self._space.labels(flat)
        if not self._numbers:
            return dict(labels)
        choices = {name: list(d.choices) for name, d in self._space.distributions(labels).items()}
        return {numbered(name): choices[name].index(label) for name, label in labels.items()}

    def _excess_gib(self, measurement: Measurement | None) -> float:
        """GiB above the memory limit; 1 where the run left no figure."""
        if measurement is None or self._memory_limit_bytes is None:
            return 1.0
        excess = measurement.peak_memory_allocated_bytes - self._memory_limit_bytes
        return max(excess, 1) / _GIB

    def _set_aside(self, number: int, outcome: str, reason: str) -> None:
        from optuna.trial import TrialState

        rejected = outcome == REJECTED
        self._store.finish(
            number,
            {"outcome": outcome, "reason": reason},
            state=TrialState.PRUNED if rejected else TrialState.FAIL,
            constraints={"validity": 1.0} if rejected else None,
        )

    def _enqueue_unseen(self) -> bool:
        """Propose a valid candidate not seen before, at random; False when there is none left."""
        if self._unseen is None:
            self._unseen = list(self._space.points(_LISTED_AT_MOST, self._random))
        while self._unseen:
            flat = self._unseen.pop()
            candidate = Candidate.from_flat(flat)
            if self._store.settled_as(candidate.key) is None and self._check(candidate) is None:
                self._store.enqueue(self._params(flat))
                return True
        return False


def open_study(
    storage_url: str,
    name: str,
    space: SearchSpace,
    check: Checker,
    *,
    metric: str,
    memory_limit_bytes: int | None = None,
    sampler: str = "tpe",
    seed: int = 0,
    engine: Engine | None = None,
) -> TuningStudy:
    """Create the named study in an Optuna storage, or open the one that is there.

    `storage_url` is a database URL, or the path of a journal file ending in ".journal". The sampler
    "residual" needs an `engine`.
    """
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    storage = open_storage(storage_url)
    study = optuna.create_study(
        storage=storage, study_name=name, direction="maximize", load_if_exists=True
    )
    store = TrialStore(study, storage)
    seed += len(store.entries())  # a resumed study goes on, it does not repeat
    study.sampler = make_sampler(sampler, seed)
    return TuningStudy(
        store,
        space,
        check,
        metric=metric,
        memory_limit_bytes=memory_limit_bytes,
        seed=seed,
        engine=engine,
        numbers=draws_numbers(sampler),
    )
