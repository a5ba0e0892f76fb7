"""A short run of the fuzzing benchmark: input of every kind, malformed in every way it knows."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

INPUTS = {"job": 120, "overrides": 120, "log": 25, "model": 150}


@pytest.fixture(scope="module")
def fuzzing():
    module = importlib.import_module("fuzz")
    return module, module.Guard()


@pytest.mark.parametrize("kind", INPUTS)
def test_malformed_input_is_answered_in_one_line(kind: str, fuzzing, tmp_path: Path) -> None:
    module, guard = fuzzing
    (tmp_path / "studies").mkdir()
    tally = module.fuzz(kind, INPUTS[kind], 1, tmp_path.resolve(), guard)
    assert tally.failures == []
    assert tally.inputs == INPUTS[kind]
    assert tally.accepted > 0


def test_what_is_written_elsewhere_is_seen(fuzzing, tmp_path: Path) -> None:
    _, guard = fuzzing
    inside = tmp_path / "study"
    inside.mkdir()
    with guard.only(inside.resolve()):
        (inside / "result.json").write_text("{}")
        (tmp_path / "stray.txt").write_text("x")
    assert [stray for stray in guard.strays if "stray.txt" in stray]
    assert not [stray for stray in guard.strays if "result.json" in stray]
