"""How the best trial of a study compares: with where it started, without recompute, by setting."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tuner.measurement import Outcome
from tuner.report.content import GIB, Effect, differing_fields, shown

_PEAK = "peak_memory_allocated_bytes"


def ran(trial: Mapping[str, Any]) -> bool:
    """Whether a trial of a summary completed within the memory limit."""
    return trial["outcome"] == Outcome.COMPLETED.value and bool(trial["measured"])


def best_comparisons(summary: Mapping[str, Any], *, has_start: bool) -> Iterator[tuple[str, str]]:
    """The best trial against the starting point and against the control without recompute.

    The starting point is the job's own first candidate (`has_start`), else the first that ran. The
    control is the best trial without recompute; where none ran, what became of them is said.
    """
    trials = sorted(summary["trials"], key=lambda trial: trial["number"])
    best = next((t for t in trials if t["number"] == summary["best"]), None)
    if best is None or not trials:
        return
    metric = summary["metric"]
    if has_start:
        yield "against your starting point", _gain(metric, best, trials[0])
    else:
        first = next(trial for trial in trials if ran(trial))
        yield "against the first trial that ran", _gain(metric, best, first)
    plain = [t for t in trials if not t["config"].get("recompute_granularity")]
    fitting = [trial for trial in plain if ran(trial)]
    if fitting:
        control = max(fitting, key=lambda trial: trial["measured"][metric])
        yield "against the best without recompute", _gain(metric, best, control)
    elif plain:
        ends = Counter(trial["outcome"] for trial in plain)
        text = ", ".join(f"{count} {outcome}" for outcome, count in ends.most_common())
        yield "without recompute", f"no trial ran within the limit ({text})"


def _gain(metric: str, best: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    if other["number"] == best["number"]:
        return "it is that trial"
    if not ran(other):
        return f"that did not run: {other['outcome']} (trial {other['number']})"
    change = best["measured"][metric] / other["measured"][metric] - 1.0
    size = (best["measured"][_PEAK] - other["measured"][_PEAK]) / GIB
    return f"{change:+.1%} {metric}, {size:+.3g} GiB (trial {other['number']})"


def effects_of(
    trials: Sequence[Mapping[str, Any]], best: Mapping[str, Any] | None, metric: str
) -> list[Effect]:
    """For each field and each other value it had: the trial most like the best one.

    Of trials that differ in equally many other fields the one with the best metric counts.
    """
    if best is None:
        return []
    completed = [trial for trial in trials if ran(trial)]
    names = differing_fields([trial["config"] for trial in completed])
    own = {name: shown(best["config"].get(name)) for name in names}
    apart = [
        (trial, {name for name in names if shown(trial["config"].get(name)) != own[name]})
        for trial in completed
    ]
    found = []
    for name in names:
        nearest: dict[str, tuple[tuple[int, float], Mapping[str, Any]]] = {}
        for trial, fields in apart:
            if name not in fields:
                continue
            value = shown(trial["config"].get(name))
            order = (len(fields) - 1, -trial["measured"][metric])
            if value not in nearest or order < nearest[value][0]:
                nearest[value] = (order, trial)
        found += [_effect(name, value, *entry, best, metric) for value, entry in nearest.items()]
    return found


def _effect(
    name: str,
    value: str,
    order: tuple[int, float],
    trial: Mapping[str, Any],
    best: Mapping[str, Any],
    metric: str,
) -> Effect:
    change = trial["measured"][metric] / best["measured"][metric] - 1.0
    more = trial["measured"][_PEAK] - best["measured"][_PEAK]
    return Effect(name, value, change, more, order[0])
