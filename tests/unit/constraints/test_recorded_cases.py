"""The rules against 18,000 recorded verdicts of the real packages."""

from __future__ import annotations

import gzip
import json
from functools import cache, lru_cache
from pathlib import Path

import pytest
from test_named_rules import CASES as NAMED_CASES

from tuner.constraints import FRONTENDS, MCORE_VERSIONS, CheckResult, check, load_rules

DATA = Path(__file__).parents[2] / "data" / "constraints"
SETS = [(version, frontend) for version in MCORE_VERSIONS for frontend in FRONTENDS]
# Names the command line has of its own for fields of the configs.
ARGUMENT_NAMES = {
    "te_rng_tracker": "use_te_rng_tracker",
    "cuda_graph_scope_deprecated": "cuda_graph_scope",
}


@cache
def cases(version: str, frontend: str) -> list[dict]:
    path = DATA / "cases" / f"{version}-{frontend}.jsonl.gz"
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


@cache
def answers(version: str, frontend: str) -> list[CheckResult]:
    """The checker's answer to every recorded case, asked once."""
    return [
        check(case["config"], mcore=version, frontend=frontend, fixes=False)
        for case in cases(version, frontend)
    ]


def recorded(version: str, frontend: str):
    """Number, case and answer of every recorded case."""
    pairs = zip(cases(version, frontend), answers(version, frontend), strict=True)
    return ((number, case, result) for number, (case, result) in enumerate(pairs))


@lru_cache(maxsize=1)
def reasons() -> list[tuple[str, list[str]]]:
    return json.loads((DATA / "reasons.json").read_text(encoding="utf-8"))


def recorded_rewrites(case: dict) -> dict[str, object]:
    """Field to value after; where several objects hold a field the model's value counts."""
    found = (case.get("rewritten") or {}).items()
    rewrites = {}
    for key, (_, after) in sorted(found, key=lambda item: (item[0].startswith("model."), item[0])):
        name = key.rpartition(".")[2]
        if isinstance(after, str) and ("<" in after or after.startswith(("layout:", "torch."))):
            continue  # the printed form of an object, not a value a candidate can hold
        rewrites[ARGUMENT_NAMES.get(name, name)] = after
    return rewrites


@pytest.mark.parametrize(("version", "frontend"), SETS)
def test_every_verdict_agrees_with_the_real_packages(version, frontend):
    wrong = [
        (number, case["valid"], case["error"])
        for number, case, result in recorded(version, frontend)
        if result.valid != case["valid"]
    ]
    assert wrong == []


@pytest.mark.parametrize(("version", "frontend"), SETS)
def test_every_recorded_rewrite_is_reported_with_the_same_value(version, frontend):
    wrong = []
    for number, case, result in recorded(version, frontend):
        if not (case["valid"] or case.get("rewritten")):
            continue
        expected, found = recorded_rewrites(case), dict(result.rewrites)
        if frontend == "megatron-lm":  # only what the command line itself changes was recorded
            found = {name: value for name, value in found.items() if name in expected}
        if expected != found:
            wrong.append((number, expected, found))
    assert wrong == []


@pytest.mark.parametrize(("version", "frontend"), SETS)
def test_the_recorded_reason_is_among_the_broken_rules(version, frontend):
    wrong = []
    explained = 0
    for number, case, result in recorded(version, frontend):
        if case["valid"]:
            continue
        expected = [ids for fragment, ids in reasons() if fragment in case["error"]]
        if not expected:
            continue
        explained += 1
        broken = {violation.rule for violation in result.errors}
        if not any(broken & set(ids) for ids in expected):
            wrong.append((number, case["error"], sorted(broken)))
    assert wrong == []
    invalid = sum(not case["valid"] for case in cases(version, frontend))
    assert explained >= 0.8 * invalid


@pytest.mark.parametrize(("version", "frontend"), SETS)
def test_no_rule_fails_to_decide_a_recorded_case(version, frontend):
    for _, _, result in recorded(version, frontend):
        assert not any("cannot be decided" in v.message for v in result.violations)


@pytest.mark.parametrize(("version", "frontend"), SETS)
def test_the_fix_of_a_single_violation_makes_the_candidate_valid(version, frontend):
    cured = changed = total = 0
    for case in cases(version, frontend)[::12]:
        result = check(case["config"], mcore=version, frontend=frontend)
        if len(result.errors) != 1:
            continue
        total += 1
        (error,) = result.errors
        fixed = {**case["config"], **(error.fix or {})}
        if error.rule == "V01":  # a null in this fix removes the field
            fixed = {name: value for name, value in fixed.items() if name not in error.fields}
        cured += check(fixed, mcore=version, frontend=frontend, fixes=False).valid
        changed += len(error.fix or {})
    assert total >= 20
    assert cured >= 0.95 * total
    assert changed <= 1.3 * total


def test_every_error_rule_is_triggered_by_a_recorded_or_a_named_case():
    triggered = {case[0] for case in NAMED_CASES}
    for version, frontend in SETS:
        for _, _, result in recorded(version, frontend):
            triggered.update(violation.rule for violation in result.errors)
    assert {rule.id for rule in load_rules() if rule.kind == "error"} - triggered == set()
