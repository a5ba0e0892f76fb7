"""The study in its Optuna storage, mirrored in memory.

The storage (SQLite, PostgreSQL, a journal file) is the study's only record. Reading it whole, or
only the trials in flight, at every proposal would take longer the more trials run, so each driver
keeps a mirror and notes, in an attribute of the study, which trials it wrote; the others read just
these. Of two drivers that start one candidate at the same moment, the later one sees the earlier:
numbers leave no gap, so a trial that it does not know and that is numbered below its own is another
driver's. A write to SQLite costs a disk flush, so what is known of a trial at its start and at its
end is one attribute each.
"""

from __future__ import annotations

import time
import uuid
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
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
_CREATED_WITHIN = 6  # attempts
_NOTED_AT_MOST = 64  # of a driver's writes; one who missed more reads the whole study


@dataclass(frozen=True, slots=True)
class Entry:
    """One trial of the storage: the labels of its axes and its attributes.

    `asked_for`: its candidate stood in the queue, no sampler drew it.
    """

    number: int
    finished: bool
    waiting: bool
    params: Mapping[str, Any]
    attributes: Mapping[str, Any]
    asked_for: bool = False

    @property
    def key(self) -> str | None:
        """The candidate's key; None for a trial that has not been asked for."""
        return self.attributes.get("key")

    @property
    def outcome(self) -> str | None:
        return self.attributes.get("outcome")

    @property
    def unnamed(self) -> bool:
        """Whether it runs and its candidate is not known yet."""
        return self.key is None and not self.finished and not self.waiting

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
        self._written: deque[int] = deque(maxlen=_NOTED_AT_MOST)
        self._writes = 0
        self._entries: dict[int, Entry] = {}
        self._of_key: dict[str, set[int]] = {}
        self._unnamed: set[int] = set()
        self._records: dict[int, TrialRecord | None] = {}
        # Writes of the other drivers that are mirrored.
        self._seen = {name: note["writes"] for name, note in self._notes().items()}
        self._read_all()

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
        """Read what other drivers have written since the last time."""
        missed: set[int] = set()
        whole = False
        for name, note in self._notes().items():
            news = note["writes"] - self._seen.get(name, 0)
            # A driver that was not there before may resume one that was killed before its note.
            whole = whole or name not in self._seen or news > len(note["written"])
            missed.update(note["written"][-news:] if news else ())
            self._seen[name] = note["writes"]
        if whole:
            self._read_all()
        else:
            self._read(missed)

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
        self._wrote(Entry(number, False, False, dict(params), dict(attributes)))
        return number

    def ask(self) -> optuna.Trial:
        """Let the study's queue, or else its sampler, start a trial."""
        import optuna

        if self.queued:
            return self.study.ask()
        # What `Study.ask` does once it has read every trial in flight to find one that waits.
        return optuna.Trial(self.study, self._storage.create_new_trial(self._id))

    def asked(self, trial: optuna.Trial, attributes: Mapping[str, Any]) -> None:
        """Note the candidate of a trial that `ask` started."""
        trial.set_user_attr(_START, dict(attributes))
        self._wrote(Entry(trial.number, False, False, trial.params, dict(attributes)))

    def enqueue(self, params: Mapping[str, Any]) -> None:
        """Have `ask` start this trial before any that the sampler draws."""
        from optuna.trial import TrialState, create_trial

        # As Optuna's own `enqueue_trial` does, which does not say under what number.
        template = create_trial(
            state=TrialState.WAITING, system_attrs={"fixed_params": dict(params)}
        )
        trial_id = self._storage.create_new_trial(self._id, template)
        number = self._storage.get_trial_number_from_id(trial_id)
        self._wrote(Entry(number, False, True, dict(params), {}))

    @property
    def queued(self) -> bool:
        """Whether a trial waits for `ask`."""
        return any(entry.waiting for entry in self._entries.values())

    def earlier_twin(self, number: int) -> int | None:
        """Another driver's trial of the same candidate, numbered before `number`.

        For trials that `add` started, which have their candidate from the first moment on.
        """
        twin = self.any_twin(number)
        return None if twin is None or twin > number else twin

    def any_twin(self, number: int) -> int | None:
        """Another driver's trial of the same candidate, whatever its number.

        For trials that `ask` started: the sampler names their candidate some time after they have
        their number. Of two that are named at the same moment neither runs.
        """
        self.refresh()
        unknown = {other for other in range(number) if other not in self._entries}
        self._read(sorted(unknown | (self._unnamed - {number})))
        key = self._entries[number].key
        return None if key is None else self.settled_as(key, beside=number)

    def settled_as(self, key: str, beside: int | None = None) -> int | None:
        """The first trial (but `beside`) that ran, runs or was refused as this candidate."""
        numbers = sorted(self._of_key.get(key, set()) - {beside})
        return next((number for number in numbers if self._entries[number].settled), None)

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
        trial = optuna.Trial(self.study, self._trial_id(number))
        trial.set_user_attr(_END, dict(attributes))
        for name, value in (constraints or {}).items():
            trial.set_constraint(name, value)
        self.study.tell(number, None if values is None else list(values), state=state)
        changed = {**entry.attributes, **attributes}
        self._wrote(Entry(number, True, False, entry.params, changed))

    def _mirror(self, trial: FrozenTrial) -> None:
        from optuna.trial import TrialState

        queued = trial.system_attrs.get("fixed_params")
        self._set(
            Entry(
                trial.number,
                trial.state.is_finished(),
                trial.state is TrialState.WAITING,
                queued or trial.params,
                {**trial.user_attrs.get(_START, {}), **trial.user_attrs.get(_END, {})},
                asked_for=bool(queued),
            )
        )

    def _set(self, entry: Entry) -> None:
        self._entries[entry.number] = entry
        (self._unnamed.add if entry.unnamed else self._unnamed.discard)(entry.number)
        if entry.key is not None:
            self._of_key.setdefault(entry.key, set()).add(entry.number)
        self._records.pop(entry.number, None)

    def _wrote(self, entry: Entry) -> None:
        self._set(entry)
        self._note(entry.number)

    def _note(self, number: int) -> None:
        """Tell the other drivers which trial this one wrote."""
        self._written.append(number)
        self._writes += 1
        self.study.set_user_attr(
            self._name, {"writes": self._writes, "written": list(self._written)}
        )

    def _notes(self) -> dict[str, dict[str, Any]]:
        """What the other drivers noted, by driver."""
        return {
            name: note
            for name, note in self.study.user_attrs.items()
            if name.startswith(_DRIVER)
            and name != self._name
            and isinstance(note, dict)
            and {"writes", "written"} <= note.keys()
        }

    def _read_all(self) -> None:
        for trial in self.study.get_trials(deepcopy=False):
            known = self._entries.get(trial.number)
            if known is None or not known.finished:
                self._mirror(trial)

    def _read(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            known = self._entries.get(number)
            if known is not None and known.finished:
                continue
            try:
                trial_id = self._trial_id(number)
            except KeyError:  # its driver has taken the number and not yet written the trial
                continue
            self._mirror(self._storage.get_trial(trial_id))

    def _trial_id(self, number: int) -> int:
        return self._storage.get_trial_id_from_study_id_trial_number(self._id, number)


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

    storage = _created(url)
    event.listen(storage.engine, "connect", _write_ahead)
    storage.engine.dispose()  # connections made before the listener was there
    return optuna.storages.get_storage(storage)


def _created(url: str) -> optuna.storages.RDBStorage:
    """The storage of a URL; drivers that start at once may get in each other's way creating it."""
    import optuna
    from sqlalchemy.exc import IntegrityError, OperationalError

    for attempt in range(1, _CREATED_WITHIN):
        try:
            return optuna.storages.RDBStorage(url)
        except (IntegrityError, OperationalError):
            time.sleep(0.2 * attempt)
    return optuna.storages.RDBStorage(url)


def _write_ahead(connection: Any, _record: object) -> None:
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=NORMAL")
