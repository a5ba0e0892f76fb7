"""Every log of `tests/data/logs` gets the cause that is known for it."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import yaml

from tuner.diagnose import UNKNOWN, Diagnosis, diagnose

LOGS = Path(__file__).parents[2] / "data" / "logs"
CASES = yaml.safe_load((LOGS / "cases.yaml").read_text())


@cache
def answer(name: str) -> Diagnosis:
    text = (LOGS / f"{name}.log").read_text(encoding="utf-8", errors="replace")
    return diagnose(text, mcore="0.19.2")


@pytest.mark.parametrize("name", sorted(CASES))
def test_the_cause_is_the_known_one(name: str) -> None:
    found = answer(name)
    assert (found.cause.cause if found.cause else UNKNOWN) == CASES[name]["cause"]


@pytest.mark.parametrize("name", sorted(CASES))
def test_evidence_is_a_line_of_the_log_with_its_number(name: str) -> None:
    lines = (LOGS / f"{name}.log").read_text(errors="replace").split("\n")
    document = answer(name).to_json()
    for line in document["evidence"] + document["likely_lines"]:
        assert line["text"][:60] in lines[line["line"] - 1]
    assert document["evidence"] or document["likely_lines"]


def test_there_are_enough_cases_and_none_is_left_over() -> None:
    assert len(CASES) >= 60
    assert {path.stem for path in LOGS.glob("*.log")} == set(CASES)
    assert sum(case["made"] == "a run that failed" for case in CASES.values()) >= 10
