"""The constraint rules agree with the real Megatron-Core and Megatron Bridge packages."""

from __future__ import annotations

import gzip
import json
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from constraint_oracle import wheels
from constraint_oracle.agreement import compare, describe, study, tuner_judge
from constraint_oracle.client import Oracle
from constraint_oracle.generator import CandidateGenerator
from constraint_oracle.minimise import minimise

SEED = int(os.environ.get("CONSTRAINT_ORACLE_SEED", "20261"))
FRESH = {"mcore": 1500, "bridge": 1000}
RECORDED = wheels.REPOSITORY / "tests" / "data" / "constraints" / "cases"
PAIRS = [(mcore, frontend) for mcore in wheels.MCORE_VERSIONS for frontend in FRESH]


@pytest.fixture(scope="module", params=PAIRS, ids=lambda pair: "-".join(pair))
def oracle(request) -> Iterator[Oracle]:
    """The running worker of one version and front end; skips loudly without its wheels."""
    mcore, frontend = request.param
    try:
        worker = Oracle(mcore, frontend)
    except wheels.WheelUnavailableError as missing:
        warnings.warn(f"NOT PROVED against Megatron-Core {mcore}: {missing}", stacklevel=1)
        pytest.skip(f"wheels of Megatron-Core {mcore} ({frontend}) cannot be fetched: {missing}")
    with worker:
        yield worker


@pytest.mark.slow
def test_rules_agree_with_the_package_on_fresh_candidates(oracle) -> None:
    judge = tuner_judge(oracle.mcore, oracle.frontend)
    outcome = study(oracle, judge, FRESH[oracle.frontend], SEED)
    assert 0.3 < outcome.valid / outcome.candidates < 0.7
    assert outcome.disagreeing == 0, describe(outcome)


@pytest.mark.slow
def test_oracle_and_rules_give_the_recorded_verdicts(oracle) -> None:
    cases = _recorded(RECORDED / f"{oracle.mcore}-{oracle.frontend}.jsonl.gz")
    configs = [case["config"] for case in cases]
    answers = oracle.ask(configs)
    wrong = [
        (case, answer)
        for case, answer in zip(cases, answers, strict=True)
        if (case["valid"], case["stage"]) != (answer["valid"], answer["stage"])
    ]
    assert not wrong, f"{len(wrong)} verdicts of the oracle differ, first: {wrong[0]}"
    outcome = compare(oracle, tuner_judge(oracle.mcore, oracle.frontend), configs, cases)
    assert outcome.disagreeing == 0, describe(outcome)


def _recorded(path: Path) -> list[dict[str, Any]]:
    """Recorded cases; a parsed pipeline layout is an object in memory, not a rewritten value."""
    with gzip.open(path, "rt") as lines:
        cases = [json.loads(line) for line in lines]
    for case in cases:
        rewritten = case.get("rewritten") or {}
        rewritten.pop("model.pipeline_model_parallel_layout", None)
    return cases


def test_candidates_depend_on_the_seed_alone() -> None:
    first, second = (CandidateGenerator(3, "0.18.0", "bridge") for _ in range(2))
    other = CandidateGenerator(4, "0.18.0", "bridge")
    drawn = [first.draw() for _ in range(50)]
    assert drawn == [second.draw() for _ in range(50)]
    assert drawn != [other.draw() for _ in range(50)]


def test_a_registry_out_of_reach_is_reported(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(wheels.WheelUnavailableError, match=r"megatron-core==0\.18\.0"):
        wheels.unpacked("megatron-core", "0.18.0", cache=tmp_path)
    assert not list(tmp_path.iterdir())


def test_minimising_keeps_only_what_the_disagreement_needs() -> None:
    config = {
        "num_layers": 24,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "recompute_modules": ["mlp", "moe_act"],
        "env": {"A": "1", "B": "2"},
        "fp8": "e4m3",
    }

    def persists(attempt: dict[str, Any]) -> bool:
        return "moe_act" in attempt.get("recompute_modules", []) and "B" in attempt.get("env", {})

    assert minimise(config, persists) == {
        "num_layers": 1,
        "hidden_size": 1024,
        "num_attention_heads": 16,
        "recompute_modules": ["moe_act"],
        "env": {"B": "2"},
    }
