"""Drivers of one storage see each other's trials, and read no more than these."""

import subprocess
import sys
from pathlib import Path

import optuna
import pytest
from optuna.distributions import CategoricalDistribution

from tuner.candidate import Candidate
from tuner.measurement import Outcome
from tuner.search.records import RUNNING
from tuner.search.store import TrialStore, open_storage

SIZES = (1, 2, 4, 8)
STORAGES = pytest.mark.parametrize("kind", ["sqlite", "journal"])


def opened(folder: Path, kind: str) -> TrialStore:
    name = "study.journal" if kind == "journal" else "study.db"
    url = f"{folder}/{name}" if kind == "journal" else f"sqlite:///{folder}/{name}"
    storage = open_storage(url)
    study = optuna.create_study(storage=storage, study_name="one", load_if_exists=True)
    return TrialStore(study, storage)


def start(store: TrialStore, size: int) -> int:
    candidate = Candidate.from_flat({"tensor_model_parallel_size": size})
    params = {"tensor_model_parallel_size": size}
    distributions = {"tensor_model_parallel_size": CategoricalDistribution(SIZES)}
    attributes = {"key": candidate.key, "candidate": candidate.to_flat(), "outcome": RUNNING}
    return store.add(params, distributions, attributes)


def fail(store: TrialStore, number: int) -> None:
    attributes = {"outcome": Outcome.CRASHED.value, "reason": "it failed"}
    store.finish(number, attributes, state=optuna.trial.TrialState.FAIL)


def outcomes(store: TrialStore) -> dict[int, str | None]:
    return {entry.number: entry.outcome for entry in store.entries()}


@STORAGES
def test_starts_and_ends_of_another_driver_are_seen_without_reading_the_study(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
):
    one, other = opened(tmp_path, kind), opened(tmp_path, kind)
    start(one, 1)
    other.refresh()
    monkeypatch.setattr(other, "_read_all", lambda: pytest.fail("the whole study was read"))
    second = start(one, 2)
    other.refresh()
    assert outcomes(other) == {0: RUNNING, 1: RUNNING}
    fail(one, second)
    other.refresh()
    assert outcomes(other) == {0: RUNNING, 1: Outcome.CRASHED.value}
    assert other.records() == one.records()


@STORAGES
def test_no_write_is_missed_however_many_there_were_meanwhile(tmp_path: Path, kind: str):
    one, other = opened(tmp_path, kind), opened(tmp_path, kind)
    start(one, 1)
    other.refresh()
    for _ in range(100):
        fail(one, start(one, 2))
    other.refresh()
    assert outcomes(other) == outcomes(one)


@STORAGES
def test_a_twin_whose_driver_was_killed_before_its_note_is_found(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
):
    one, other = opened(tmp_path, kind), opened(tmp_path, kind)
    monkeypatch.setattr(one, "_note", lambda number: None)
    first, second = start(one, 4), start(other, 4)
    assert other.earlier_twin(second) == first
    assert one.earlier_twin(first) is None


@STORAGES
def test_a_driver_that_resumes_a_killed_one_has_the_others_read_what_was_not_noted(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
):
    killed, other = opened(tmp_path, kind), opened(tmp_path, kind)
    number = start(killed, 1)
    other.refresh()
    monkeypatch.setattr(killed, "_note", lambda number: None)
    fail(killed, number)
    other.refresh()
    assert outcomes(other) == {0: RUNNING}
    start(opened(tmp_path, kind), 2)
    other.refresh()
    assert outcomes(other) == {0: Outcome.CRASHED.value, 1: RUNNING}


@STORAGES
def test_a_queued_trial_is_seen_by_the_other_driver_and_started_once(tmp_path: Path, kind: str):
    one, other = opened(tmp_path, kind), opened(tmp_path, kind)
    one.enqueue({"tensor_model_parallel_size": 8})
    other.refresh()
    assert one.queued
    assert other.queued
    trial = other.ask()
    assert trial.suggest_categorical("tensor_model_parallel_size", SIZES) == 8
    other.asked(trial, {"key": "k", "outcome": RUNNING})
    one.refresh()
    assert not one.queued
    assert not other.queued


@STORAGES
def test_a_candidate_that_two_samplers_draw_at_once_runs_once_at_most(tmp_path: Path, kind: str):
    one, other = opened(tmp_path, kind), opened(tmp_path, kind)
    named = {"key": "k", "candidate": {}, "outcome": RUNNING}
    first, second = one.ask(), other.ask()
    other.asked(second, named)
    assert other.any_twin(second.number) is None
    one.asked(first, named)
    assert one.any_twin(first.number) == second.number


def test_drivers_may_create_a_storage_at_the_same_moment(tmp_path: Path):
    create = (
        "import sys; from tuner.search.store import open_storage; "
        "open_storage(sys.argv[1]).get_all_studies()"
    )
    url = f"sqlite:///{tmp_path}/study.db"
    drivers = [
        subprocess.Popen([sys.executable, "-c", create, url], stderr=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    errors = [driver.communicate(timeout=120)[1] for driver in drivers]
    assert [driver.returncode for driver in drivers] == [0] * 4, errors
