"""The study: proposes candidates with Optuna and remembers every trial.

The Optuna storage is the study's only record: each trial's candidate, outcome, reason and
measurement stand in its user attributes, so a study can be reopened, reported and resumed from
`study.db` alone. States are used so that samplers learn the right thing:

- a candidate the rules reject is PRUNED, with the rule, and violates the constraint; it never
  leaves this module and counts against no budget;
- out of memory is COMPLETE with the excess as a violated constraint (samplers ignore failed
  trials, and would propose its neighbours again and again);
- a timeout is COMPLETE at an objective of zero; a crash, a divergence and an interruption FAIL.
"""

from __future__ import annotations

import random
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tuner.candidate import Candidate
from tuner.errors import InputError
from tuner.measurement import Measurement, Outcome, TrialResult
from tuner.search.space import SearchSpace

if TYPE_CHECKING:
    import optuna

REJECTED = "rejected"
DUPLICATE = "duplicate"
RUNNING = "running"
_REPEATS_BEFORE_LISTING = 4  # proposals in a row already seen before unseen ones are listed
_LISTED_AT_MOST = 20_000  # points of the space looked at when listing
_ASKS_AT_MOST = 2_000  # proposals in a row none of which can be launched
_GIB = 2**30


@dataclass(frozen=True, slots=True)
class Rejection:
    """Why a candidate may not run: the rule's id and its message."""

    rule: str
    message: str


Checker = Callable[[Candidate], "Rejection | None"]


@dataclass(frozen=True, slots=True)
class Proposal:
    """A valid candidate to launch; `number` is its trial number in the study."""

    number: int
    candidate: Candidate


@dataclass(frozen=True, slots=True)
class TrialRecord:
    """What the study knows of one trial. `outcome` is an Outcome's value or "running"."""

    number: int
    candidate: Candidate
    outcome: str
    reason: str
    duration_s: float
    measurement: Measurement | None

    @property
    def feasible(self) -> bool:
        """Whether it ran through within the memory limit."""
        return self.outcome == Outcome.COMPLETED.value and self.measurement is not None


class TuningStudy:
    """Ask for candidates, tell their results; any Optuna storage.

    `check` decides validity; `metric` names the Measurement field to maximise; `start` are flat
    candidates proposed first. The same seed, space and results give the same proposals.
    """

    def __init__(
        self,
        study: optuna.Study,
        space: SearchSpace,
        check: Checker,
        *,
        metric: str,
        memory_limit_bytes: int | None,
        seed: int,
    ) -> None:
        self._study = study
        self._space = space
        self._check = check
        self._metric = metric
        self._memory_limit_bytes = memory_limit_bytes
        self._random = random.Random(seed)
        self._seen: dict[str, int] = {}
        self._unseen: list[dict[str, Any]] | None = None
        for trial in study.get_trials(deepcopy=False):
            key = trial.user_attrs.get("key")
            if key is not None and trial.user_attrs.get("outcome") not in (
                DUPLICATE,
                Outcome.INTERRUPTED.value,
            ):
                self._seen.setdefault(key, trial.number)

    def enqueue(self, flat: Mapping[str, Any]) -> None:
        """Propose this flat candidate next. Raises InputError where it lies outside the space."""
        self._study.enqueue_trial(self._space.labels(Candidate.from_flat(flat).to_flat()))

    def ask(self) -> Proposal | None:
        """The next candidate to launch, or None when the space holds no other."""
        repeats = 0
        for _ in range(_ASKS_AT_MOST):
            trial = self._study.ask()
            candidate = Candidate.from_flat(self._space.suggest(trial))
            trial.set_user_attr("key", candidate.key)
            trial.set_user_attr("candidate", candidate.to_flat())
            earlier = self._seen.get(candidate.key)
            if earlier is not None:
                self._set_aside(trial, DUPLICATE, f"same run as trial {earlier}")
                repeats += 1
                if repeats >= _REPEATS_BEFORE_LISTING and not self._enqueue_unseen():
                    return None
                continue
            self._seen[candidate.key] = trial.number
            rejection = self._check(candidate)
            if rejection is None:
                trial.set_user_attr("outcome", RUNNING)
                return Proposal(trial.number, candidate)
            trial.set_user_attr("rule", rejection.rule)
            self._set_aside(trial, REJECTED, rejection.message)
        return None

    def tell(self, number: int, result: TrialResult) -> None:
        """Record how trial `number` ended. Raises ValueError where it is not running."""
        from optuna.trial import TrialState

        trial = self._open_trial(number)
        measured = result.measurement
        trial.set_user_attr("outcome", result.outcome.value)
        trial.set_user_attr("reason", result.reason)
        trial.set_user_attr("duration_s", result.duration_s)
        trial.set_user_attr("measurement", None if measured is None else measured.to_json())
        value = 0.0 if measured is None else float(getattr(measured, self._metric))
        if result.outcome is Outcome.COMPLETED and measured is not None:
            trial.set_constraint("memory", 0.0)
            self._study.tell(number, value)
        elif result.outcome is Outcome.OOM:
            trial.set_constraint("memory", self._excess_gib(measured))
            self._study.tell(number, value)
        elif result.outcome is Outcome.TIMEOUT:
            self._study.tell(number, 0.0)
        else:
            if result.outcome is Outcome.INTERRUPTED:
                self._seen = {k: n for k, n in self._seen.items() if n != number}
            self._study.tell(number, state=TrialState.FAIL)

    def interrupt_running(self, reason: str, *, requeue: bool) -> list[int]:
        """End every trial still marked running as interrupted; with `requeue` propose it again."""
        from optuna.trial import TrialState

        numbers = []
        for trial in self._study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            self.tell(trial.number, TrialResult(Outcome.INTERRUPTED, reason))
            if requeue and trial.user_attrs.get("outcome") == RUNNING:
                self._study.enqueue_trial(trial.params)
            numbers.append(trial.number)
        return numbers

    def requeue_interrupted(self) -> int:
        """Propose again the interrupted candidates that no later trial has run; how many."""
        waiting = {}
        for trial in self._study.get_trials(deepcopy=False):
            if trial.user_attrs.get("outcome") == Outcome.INTERRUPTED.value:
                waiting[trial.user_attrs["key"]] = trial.params
        fresh = [params for key, params in waiting.items() if key not in self._seen]
        for params in fresh:
            self._study.enqueue_trial(params, skip_if_exists=False)
        return len(fresh)

    def records(self) -> list[TrialRecord]:
        """Every launched trial, in order (rejected and repeated proposals are not trials)."""
        records = []
        for trial in self._study.get_trials(deepcopy=False):
            attrs = trial.user_attrs
            outcome = attrs.get("outcome")
            if outcome in (None, REJECTED, DUPLICATE):
                continue
            measured = attrs.get("measurement")
            records.append(
                TrialRecord(
                    number=trial.number,
                    candidate=Candidate.from_flat(attrs["candidate"]),
                    outcome=outcome,
                    reason=attrs.get("reason", ""),
                    duration_s=attrs.get("duration_s", 0.0),
                    measurement=None if measured is None else Measurement.from_json(measured),
                )
            )
        return records

    def rejected(self) -> dict[str, int]:
        """How many proposals each rule rejected, by rule id."""
        trials = self._study.get_trials(deepcopy=False)
        return dict(Counter(t.user_attrs["rule"] for t in trials if "rule" in t.user_attrs))

    def best(self) -> TrialRecord | None:
        """The feasible trial with the best metric; the earlier one of equals."""
        return best_of(self.records(), self._metric)

    def _excess_gib(self, measurement: Measurement | None) -> float:
        """GiB above the memory limit; 1 where the run left no figure."""
        if measurement is None or self._memory_limit_bytes is None:
            return 1.0
        excess = measurement.peak_memory_allocated_bytes - self._memory_limit_bytes
        return max(excess, 1) / _GIB

    def _set_aside(self, trial: optuna.Trial, outcome: str, reason: str) -> None:
        from optuna.trial import TrialState

        trial.set_user_attr("outcome", outcome)
        trial.set_user_attr("reason", reason)
        if outcome == REJECTED:
            trial.set_constraint("validity", 1.0)
        state = TrialState.PRUNED if outcome == REJECTED else TrialState.FAIL
        self._study.tell(trial.number, state=state)

    def _enqueue_unseen(self) -> bool:
        """Propose a valid candidate not seen before, at random; False when there is none left."""
        if self._unseen is None:
            self._unseen = self._space.points(_LISTED_AT_MOST, self._random)
        while self._unseen:
            flat = self._unseen.pop()
            candidate = Candidate.from_flat(flat)
            if candidate.key not in self._seen and self._check(candidate) is None:
                self._study.enqueue_trial(self._space.labels(flat))
                return True
        return False

    def _open_trial(self, number: int) -> optuna.Trial:
        import optuna

        trials = self._study.get_trials(deepcopy=False)
        if not 0 <= number < len(trials) or trials[number].state.is_finished():
            raise ValueError(f"trial {number} is not running")
        return optuna.Trial(self._study, trials[number]._trial_id)


def best_of(records: list[TrialRecord], metric: str) -> TrialRecord | None:
    """The feasible record with the largest `metric` of its measurement."""
    feasible = [record for record in records if record.feasible]
    if not feasible:
        return None
    return max(feasible, key=lambda r: (getattr(r.measurement, metric), -r.number))


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
) -> TuningStudy:
    """Create the named study in an Optuna storage, or open the one that is there."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(
        storage=storage_url, study_name=name, direction="maximize", load_if_exists=True
    )
    seed += len(study.get_trials(deepcopy=False))  # a resumed study goes on, it does not repeat
    study.sampler = _sampler(sampler, seed)
    return TuningStudy(
        study, space, check, metric=metric, memory_limit_bytes=memory_limit_bytes, seed=seed
    )


def _sampler(name: str, seed: int) -> optuna.samplers.BaseSampler:
    import optuna

    if name == "random":
        return optuna.samplers.RandomSampler(seed=seed)
    if name == "tpe":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            return optuna.samplers.TPESampler(seed=seed, n_startup_trials=6, group=True)
    raise InputError(f"there is no sampler '{name}'", field="search.sampler", fix="use tpe")


def pareto_front(records: list[TrialRecord], metric: str) -> list[TrialRecord]:
    """Feasible trials that no other beats in both peak memory and `metric`, leanest first."""
    feasible = [(r, r.measurement) for r in records if r.feasible and r.measurement is not None]
    feasible.sort(key=lambda p: (p[1].peak_memory_allocated_bytes, -getattr(p[1], metric)))
    front: list[TrialRecord] = []
    reached = float("-inf")
    for record, measured in feasible:
        if getattr(measured, metric) > reached:
            reached = getattr(measured, metric)
            front.append(record)
    return front
