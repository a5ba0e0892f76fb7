"""The study in its Optuna storage, mirrored in memory.

The storage (SQLite, PostgreSQL, a journal file) is the study's only record. Reading it whole at
every proposal would take longer the more trials run, so each driver keeps a mirror and counts its
own writes in an attribute of the study; the mirror is read again only when another driver's count
has moved. A driver announces a write before it makes it, so that of two drivers that propose one
candidate at the same moment the later sees the earlier.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tuner.candidate import Candidate
from tuner.measurement import Measurement
from tuner.search.records import DUPLICATE, REJECTED, TrialRecord

if TYPE_CHECKING:
    import optuna
    from optuna.distributions import BaseDistribution
    from optuna.trial import FrozenTrial

_COUNTER = "writes:"
_READ_AGAIN_S = 30.0  # also sees writers that keep no count


@dataclass(frozen=True, slots=True)
class Entry:
    """One trial of the storage: the labels of its axes and its attributes."""

    number: int
    finished: bool
    waiting: bool
    params: Mapping[str, Any]
    attributes: Mapping[str, Any]

    @property
    def key(self) -> str | None:
        """The candidate's key; None for a trial that has not been asked for."""
        return self.attributes.get("key")

    @property
    def outcome(self) -> str | None:
        return self.attributes.get("outcome")

    def record(self) -> TrialRecord | None:
        """The trial as the study shows it; None where it was never launched."""
        attributes, outcome = self.attributes, self.outcome
        if outcome in (None, REJECTED, DUPLICATE):
            return None
        measured = attributes.get("measurement")
        return TrialRecord(
            number=self.number,
            candidate=Candidate.from_flat(attributes["candidate"]),
            outcome=str(outcome),
            reason=attributes.get("reason", ""),
            duration_s=attributes.get("duration_s", 0.0),
            measurement=None if measured is None else Measurement.from_json(measured),
            expected=attributes.get("expected"),
        )


class TrialStore:
    """Every trial of a study, and the ways in which they change."""

    def __init__(self, study: optuna.Study, storage: optuna.storages.BaseStorage) -> None:
        self.study = study
        self._storage = storage
        self._id = storage.get_study_id_from_name(study.study_name)
        self._counter = _COUNTER + uuid.uuid4().hex
        self._writes = 0
        self._others: dict[str, int] = {}
        self._read_at = float("-inf")
        self._entries: dict[int, Entry] = {}
        self._records: dict[int, TrialRecord | None] = {}
        self.refresh()

    def entries(self) -> list[Entry]:
        """Every trial, in order of number, as of the last `refresh`."""
        return [self._entries[number] for number in sorted(self._entries)]

    def entry(self, number: int) -> Entry | None:
        return self._entries.get(number)

    def record(self, number: int) -> TrialRecord | None:
        """The trial as the study shows it; None where there is none or it was never launched."""
        if number not in self._entries:
            return None
        if number not in self._records:
            self._records[number] = self._entries[number].record()
        return self._records[number]

    def records(self) -> list[TrialRecord]:
        """Every launched trial, in order."""
        found = (self.record(number) for number in sorted(self._entries))
        return [record for record in found if record is not None]

    def refresh(self) -> None:
        """Read what other drivers wrote since the last time."""
        others = self._counts()
        now = time.monotonic()
        if others == self._others and now - self._read_at < _READ_AGAIN_S:
            return
        for trial in self.study.get_trials(deepcopy=False):
            known = self._entries.get(trial.number)
            if known is None or not known.finished:
                self._mirror(trial)
        self._others, self._read_at = others, now

    def add(
        self,
        params: Mapping[str, Any],
        distributions: Mapping[str, BaseDistribution],
        attributes: Mapping[str, Any],
    ) -> int:
        """Start a trial with all its parameters at once; its number."""
        from optuna.trial import TrialState, create_trial

        self._announce()
        template = create_trial(
            state=TrialState.RUNNING,
            params=dict(params),
            distributions=dict(distributions),
            user_attrs=dict(attributes),
        )
        trial_id = self._storage.create_new_trial(self._id, template)
        number = self._storage.get_trial_number_from_id(trial_id)
        self._set(Entry(number, False, False, dict(params), dict(attributes)))
        return number

    def ask(self) -> optuna.Trial:
        """Let the study's sampler (or its queue) start a trial."""
        self._announce()
        return self.study.ask()

    def asked(self, trial: optuna.Trial, attributes: Mapping[str, Any]) -> None:
        """Note the candidate of a trial that `ask` started."""
        for name, value in attributes.items():
            trial.set_user_attr(name, value)
        self._set(Entry(trial.number, False, False, trial.params, dict(attributes)))

    def enqueue(self, params: Mapping[str, Any]) -> None:
        """Have `ask` start this trial before any that the sampler draws."""
        self._announce()
        self.study.enqueue_trial(dict(params), skip_if_exists=False)
        self._read_at = float("-inf")
        self.refresh()

    @property
    def queued(self) -> bool:
        """Whether a trial waits for `ask`."""
        return any(entry.waiting for entry in self._entries.values())

    def earlier_twin(self, number: int) -> int | None:
        """Another driver's trial of the same candidate, started before `number`."""
        if self._counts() == self._others:
            return None
        self.refresh()
        key = self._entries[number].key
        for entry in self.entries():
            if entry.number < number and entry.key == key and entry.outcome != DUPLICATE:
                return entry.number
        return None

    def finish(
        self,
        number: int,
        attributes: Mapping[str, Any],
        *,
        values: Sequence[float] | None = None,
        state: optuna.trial.TrialState | None = None,
        constraints: Mapping[str, float] | None = None,
    ) -> None:
        """End a running trial. Raises ValueError where it is not running."""
        import optuna

        entry = self._entries.get(number)
        if entry is None or entry.finished or entry.waiting:
            raise ValueError(f"trial {number} is not running")
        self._announce()
        trial_id = self._storage.get_trial_id_from_study_id_trial_number(self._id, number)
        trial = optuna.Trial(self.study, trial_id)
        for name, value in attributes.items():
            trial.set_user_attr(name, value)
        for name, value in (constraints or {}).items():
            trial.set_constraint(name, value)
        self.study.tell(number, None if values is None else list(values), state=state)
        changed = {**entry.attributes, **attributes}
        self._set(Entry(number, True, False, entry.params, changed))

    def _mirror(self, trial: FrozenTrial) -> None:
        from optuna.trial import TrialState

        params = trial.params or trial.system_attrs.get("fixed_params", {})
        self._set(
            Entry(
                trial.number,
                trial.state.is_finished(),
                trial.state is TrialState.WAITING,
                params,
                trial.user_attrs,
            )
        )

    def _set(self, entry: Entry) -> None:
        self._entries[entry.number] = entry
        self._records.pop(entry.number, None)

    def _announce(self) -> None:
        self._writes += 1
        self.study.set_user_attr(self._counter, self._writes)

    def _counts(self) -> dict[str, int]:
        """Writes of every other driver."""
        attributes = self.study.user_attrs
        return {
            name: count
            for name, count in attributes.items()
            if name.startswith(_COUNTER) and name != self._counter
        }
