"""The study in its Optuna storage, mirrored in memory.

The storage (SQLite, PostgreSQL, a journal file) is the study's only record. Reading it whole at
every proposal would take longer the more trials run, so each driver keeps a mirror. Drivers sign
their presence in an attribute of the study, and read again only what others may have written since
they last read; of two drivers that start one candidate at the same moment, the later one sees the
earlier. A write to SQLite costs a disk flush, so what is known of a trial at its start and at its
end is one attribute each.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tuner.candidate import Candidate
from tuner.measurement import Measurement, Outcome
from tuner.search.records import DUPLICATE, REJECTED, TrialRecord

if TYPE_CHECKING:
    import optuna
    from optuna.distributions import BaseDistribution
    from optuna.trial import FrozenTrial

_DRIVER = "driver:"
_START, _END = "trial", "result"
_SIGNED_EVERY_S = 30.0
_ACTIVE_WITHIN_S = 120.0  # clocks of the drivers' hosts may differ by less than the rest of this


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

    @property
    def settled(self) -> bool:
        """Whether it ran, runs or was refused; not where it waits, was cut short or is a copy."""
        unsettled = (None, DUPLICATE, Outcome.INTERRUPTED.value)
        return not self.waiting and (self.outcome not in unsettled or "rule" in self.attributes)

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
            evidence=attributes.get("evidence") or {},
        )


class TrialStore:
    """Every trial of a study, and the ways in which they change."""

    def __init__(self, study: optuna.Study, storage: optuna.storages.BaseStorage) -> None:
        self.study = study
        self._storage = storage
        self._id = storage.get_study_id_from_name(study.study_name)
        self._name = _DRIVER + uuid.uuid4().hex
        self._signed_at = float("-inf")
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
        """Read what other drivers may have written since the last time."""
        self._sign()
        if not self._others_since(self._read_at):
            return
        self._read_at = time.time()
        for trial in self.study.get_trials(deepcopy=False):
            known = self._entries.get(trial.number)
            if known is None or not known.finished:
                self._mirror(trial)

    def add(
        self,
        params: Mapping[str, Any],
        distributions: Mapping[str, BaseDistribution],
        attributes: Mapping[str, Any],
    ) -> int:
        """Start a trial with all its parameters at once; its number."""
        from optuna.trial import TrialState, create_trial

        template = create_trial(
            state=TrialState.RUNNING,
            params=dict(params),
            distributions=dict(distributions),
            user_attrs={_START: dict(attributes)},
        )
        trial_id = self._storage.create_new_trial(self._id, template)
        number = self._storage.get_trial_number_from_id(trial_id)
        self._set(Entry(number, False, False, dict(params), dict(attributes)))
        return number

    def ask(self) -> optuna.Trial:
        """Let the study's sampler (or its queue) start a trial."""
        return self.study.ask()

    def asked(self, trial: optuna.Trial, attributes: Mapping[str, Any]) -> None:
        """Note the candidate of a trial that `ask` started."""
        trial.set_user_attr(_START, dict(attributes))
        self._set(Entry(trial.number, False, False, trial.params, dict(attributes)))

    def enqueue(self, params: Mapping[str, Any]) -> None:
        """Have `ask` start this trial before any that the sampler draws."""
        self.study.enqueue_trial(dict(params), skip_if_exists=False)
        self._read_at = float("-inf")
        self.refresh()

    @property
    def queued(self) -> bool:
        """Whether a trial waits for `ask`."""
        return any(entry.waiting for entry in self._entries.values())

    def earlier_twin(self, number: int) -> int | None:
        """Another driver's trial of the same candidate, started before `number`."""
        if not self._others_since(self._read_at):
            return None
        self.refresh()
        key = self._entries[number].key
        for entry in self.entries():
            if entry.number < number and entry.key == key and entry.settled:
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
        trial_id = self._storage.get_trial_id_from_study_id_trial_number(self._id, number)
        trial = optuna.Trial(self.study, trial_id)
        trial.set_user_attr(_END, dict(attributes))
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
                {**trial.user_attrs.get(_START, {}), **trial.user_attrs.get(_END, {})},
            )
        )

    def _set(self, entry: Entry) -> None:
        self._entries[entry.number] = entry
        self._records.pop(entry.number, None)

    def _sign(self) -> None:
        """Say, now and then, that this driver is at work."""
        now = time.time()
        if now - self._signed_at >= _SIGNED_EVERY_S:
            self.study.set_user_attr(self._name, now)
            self._signed_at = now

    def _others_since(self, moment: float) -> bool:
        """Whether another driver may have written since then; always, when nothing was read."""
        if moment == float("-inf"):
            return True
        return any(
            name.startswith(_DRIVER) and name != self._name and signed > moment - _ACTIVE_WITHIN_S
            for name, signed in self.study.user_attrs.items()
        )


def open_storage(url: str) -> optuna.storages.BaseStorage:
    """The Optuna storage of a database URL, or of a journal file (a path ending in ".journal").

    An empty URL is a storage in memory.
    SQLite writes ahead and flushes at checkpoints: a killed driver loses nothing, and a write does
    not wait for the disk.
    """
    import optuna

    if url.endswith(".journal"):
        from optuna.storages.journal import JournalFileBackend

        return optuna.storages.JournalStorage(JournalFileBackend(url))
    if not url:
        return optuna.storages.InMemoryStorage()
    if not url.startswith("sqlite:///") or ":memory:" in url:
        return optuna.storages.get_storage(url)
    from sqlalchemy import event

    storage = optuna.storages.RDBStorage(url)
    event.listen(storage.engine, "connect", _write_ahead)
    storage.engine.dispose()  # connections made before the listener was there
    return optuna.storages.get_storage(storage)


def _write_ahead(connection: Any, _record: object) -> None:
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=NORMAL")
