"""Compares `tuner.constraints.check` with the verdicts of the real packages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from constraint_oracle.client import Oracle, Verdict
from constraint_oracle.generator import CandidateGenerator, Weights
from constraint_oracle.minimise import minimise

#: Before these stages pass, a package holds no final values to compare.
UNFINISHED_STAGES = frozenset(("transformer_config", "bridge"))
MINIMISED = 12

Config = dict[str, Any]
#: candidate -> (valid, {field: value after rewriting}, ids of the errors)
Judge = Callable[[Mapping[str, Any]], tuple[bool, dict[str, Any], list[str]]]


@dataclass(frozen=True, slots=True)
class Disagreement:
    """A smallest candidate on which the rules and the package differ, and in what."""

    kind: str
    config: Config
    package: Verdict
    rules: list[str]
    rewrites: dict[str, Any]


@dataclass(slots=True)
class Agreement:
    """Outcome over many candidates of one version and front end."""

    mcore: str
    frontend: str
    candidates: int = 0
    valid: int = 0
    disagreeing: int = 0
    excepted: int = 0
    disagreements: list[Disagreement] = field(default_factory=list)
    errors_triggered: Counter[str] = field(default_factory=Counter)

    @property
    def rate(self) -> float:
        """Fraction of candidates on which both agree."""
        return 1.0 - self.disagreeing / self.candidates if self.candidates else 0.0


@cache
def knowingly_stricter(frontend: str) -> frozenset[str]:
    """Rules listed as refusing what no check of the packages refuses."""
    from tuner.constraints.docs import exceptions

    return frozenset(
        str(one["rule"])
        for one in exceptions()
        if one["side"] == "stricter" and frontend in one["frontends"]
    )


def tuner_judge(mcore: str, frontend: str) -> Judge:
    """The judge under test."""
    from tuner.constraints import check

    def judge(config: Mapping[str, Any]) -> tuple[bool, dict[str, Any], list[str]]:
        result = check(dict(config), mcore=mcore, frontend=frontend, fixes=False)
        errors = [one.rule for one in result.violations if one.kind == "error"]
        return result.valid, dict(result.rewrites), errors

    return judge


def differences(
    config: Mapping[str, Any], verdict: Verdict, valid: bool, rewrites: Mapping[str, Any]
) -> list[str]:
    """In what the two differ: "valid", or "rewrite of FIELD"; empty when they agree."""
    if valid != verdict["valid"]:
        return ["valid"]
    if verdict["stage"] in UNFINISHED_STAGES:
        return []
    held: dict[str, list[Any]] = {}
    for name, (_, after) in (verdict.get("rewritten") or {}).items():
        held.setdefault(name.rpartition(".")[2], []).append(after)
    found = [
        f"rewrite of {name}"
        for name, after in held.items()
        if name not in rewrites or rewrites[name] not in after
    ]
    if verdict["valid"]:
        found += [
            f"rewrite of {name}"
            for name in rewrites
            if name in config and name not in held and name != "pipeline_model_parallel_layout"
        ]
    return sorted(found)


def study(
    oracle: Oracle,
    judge: Judge,
    count: int,
    seed: int,
    weights: Weights | None = None,
) -> Agreement:
    """Asks both about ``count`` fresh candidates; disagreements come back minimised."""
    generator = CandidateGenerator(seed, oracle.mcore, oracle.frontend, weights)
    configs = [generator.draw() for _ in range(count)]
    return compare(oracle, judge, configs, oracle.ask(configs))


def compare(
    oracle: Oracle, judge: Judge, configs: Sequence[Config], verdicts: Sequence[Verdict]
) -> Agreement:
    """Agreement of the judge with verdicts already given; the oracle is asked only to minimise."""
    outcome = Agreement(oracle.mcore, oracle.frontend)
    seen: set[tuple[str, str]] = set()
    for config, verdict in zip(configs, verdicts, strict=True):
        valid, rewrites, errors = judge(config)
        outcome.candidates += 1
        outcome.valid += bool(verdict["valid"])
        outcome.errors_triggered.update(set(errors))
        kinds = differences(config, verdict, valid, rewrites)
        if kinds == ["valid"] and errors and set(errors) <= knowingly_stricter(oracle.frontend):
            outcome.excepted += 1
            continue
        if not kinds:
            continue
        outcome.disagreeing += 1
        if len(outcome.disagreements) < MINIMISED:
            smallest = _smallest(oracle, judge, config, kinds[0], verdict)
            signature = (kinds[0], str(sorted(smallest.config, key=str)))
            if signature not in seen:
                seen.add(signature)
                outcome.disagreements.append(smallest)
    return outcome


def _smallest(
    oracle: Oracle, judge: Judge, config: Config, kind: str, verdict: Verdict
) -> Disagreement:
    """Minimises while the same kind of difference persists in the same direction."""

    def persists(attempt: Config) -> bool:
        valid, rewrites, _ = judge(attempt)
        answer = oracle.ask([attempt])[0]
        same_side = all(answer[part] == verdict[part] for part in ("valid", "stage", "exc"))
        return same_side and kind in differences(attempt, answer, valid, rewrites)

    smallest = minimise(config, persists)
    _, rewrites, errors = judge(smallest)
    return Disagreement(kind, smallest, oracle.ask([smallest])[0], errors, rewrites)


def describe(outcome: Agreement) -> str:
    """The disagreements as lines a person can act on."""
    lines = [
        f"{outcome.mcore} {outcome.frontend}: {outcome.disagreeing} of {outcome.candidates} "
        "candidates disagree"
    ]
    for one in outcome.disagreements:
        package = "valid" if one.package["valid"] else f"{one.package['exc']} at "
        package += "" if one.package["valid"] else f"{one.package['stage']}: {one.package['error']}"
        rules = f"errors {one.rules}" if one.rules else f"valid, rewrites {one.rewrites}"
        rewritten = one.package.get("rewritten")
        lines.append(f"- {one.kind}: {one.config}")
        lines.append(f"    package: {package}" + (f" rewritten {rewritten}" if rewritten else ""))
        lines.append(f"    rules:   {rules}")
    return "\n".join(lines)
