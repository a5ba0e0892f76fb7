"""Why the best candidate is the best: what each of its settings does, and what else was close."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tuner.candidate import Candidate
from tuner.search.space import label_of
from tuner.search.table import fields_of

if TYPE_CHECKING:
    from tuner.search.planning.front import Ranked
    from tuner.search.planning.plan import Plan
    from tuner.search.planning.workplace import Workplace

_GIB = 2**30


def explain_best(plan: Plan, place: Workplace, hidden: Collection[str] = ()) -> dict[str, Any]:
    """What the best candidate owes to each setting, and what other memory would buy.

    `knobs` holds, for each field, the best kept candidate with another value there: its value and
    by how much its step is slower (a fraction) and its peak higher (bytes). `importance` is the
    share of the spread of log step time over the kept candidates that each field's values explain.
    `with_less_memory` and `with_more_memory` are the best candidates under 10 GiB less and more.
    Fields in `hidden` are not worth a word in the text.
    """
    if not plan.best:
        return {"knobs": {}, "importance": {}, "text": []}
    from tuner.search.planning.whole import BEYOND_BYTES

    best = plan.best[0]
    knobs = _knobs(plan.best)
    less = _within(plan.best, best.limit_bytes - BEYOND_BYTES)
    return {
        "knobs": knobs,
        "importance": importance(
            [one.candidate for one in plan.best], [one.step_time_s for one in plan.best]
        ),
        "with_less_memory": None if less is None else _compared(less, best),
        "with_more_memory": None if plan.beyond is None else _compared(plan.beyond, best),
        "text": _text(best, knobs, less, plan.beyond, place, len(plan.best), hidden),
    }


def importance(candidates: Sequence[Candidate], step_times_s: Sequence[float]) -> dict[str, float]:
    """By field, the share of the variance of log step time that its values explain.

    Main effects only (a one-way analysis of variance for each field), so they need not sum to 1.
    Fields that explain less than 0.1 % are left out.
    """
    import numpy as np

    if len(candidates) < 3:
        return {}
    log_time = np.log(np.asarray(step_times_s))
    total = float(((log_time - log_time.mean()) ** 2).sum())
    if total <= 0:
        return {}
    spread = [fields_of(candidate) for candidate in candidates]
    found = {}
    for name in sorted({name for fields in spread for name in fields}):
        labels = [label_of(fields.get(name)) for fields in spread]
        distinct = {label: place for place, label in enumerate(dict.fromkeys(labels))}
        if len(distinct) < 2:
            continue
        code = np.array([distinct[label] for label in labels])
        counts = np.bincount(code)
        means = np.bincount(code, weights=log_time) / counts
        found[name] = float((counts * (means - log_time.mean()) ** 2).sum()) / total
    ordered = sorted(found.items(), key=lambda item: -item[1])
    return {name: share for name, share in ordered if share >= 0.001}


def _knobs(entries: Sequence[Ranked]) -> dict[str, dict[str, Any]]:
    """For each field of the best entry, the fastest entry with another value there."""
    best = entries[0]
    own = fields_of(best.candidate)
    spread = [(entry, fields_of(entry.candidate)) for entry in entries[1:]]
    names = dict.fromkeys([*own, *(name for _, fields in spread for name in fields)])
    found: dict[str, dict[str, Any]] = {}
    for name in names:
        label = label_of(own.get(name))
        other = next((e for e, fields in spread if label_of(fields.get(name)) != label), None)
        if other is not None:
            found[name] = {
                "value": own.get(name),
                "other": fields_of(other.candidate).get(name),
                **_compared(other, best),
            }
    return found


def _within(entries: Sequence[Ranked], limit_bytes: float) -> Ranked | None:
    return next((entry for entry in entries if entry.memory_bytes <= limit_bytes), None)


def _compared(other: Ranked, best: Ranked) -> dict[str, Any]:
    return {
        "config": other.candidate.to_flat(),
        "slower": other.step_time_s / best.step_time_s - 1.0,
        "more_bytes": int(other.memory_bytes - best.memory_bytes),
    }


def _text(
    best: Ranked,
    knobs: Mapping[str, Mapping[str, Any]],
    less: Ranked | None,
    more: Ranked | None,
    place: Workplace,
    kept: int,
    hidden: Collection[str],
) -> list[str]:
    settings = best.candidate.memory_label(hidden)
    lines = [f"best: {best.candidate.label(place.world_size)}, {settings}"]
    spent = sorted(best.time_parts.items(), key=lambda item: -item[1])
    shown = [f"{name} {seconds / best.step_time_s:.0%}" for name, seconds in spent[:5]]
    lines.append(f"its step is spent on {', '.join(shown)}")
    lines += _knob_lines(knobs, kept)
    for other, amount in ((less, "less"), (more, "more")):
        if other is not None:
            change = other.step_time_s / best.step_time_s - 1
            lines.append(
                f"with 10 GiB {amount}: {other.candidate.label(place.world_size)}, "
                f"{other.candidate.memory_label(hidden)}, step {change:+.1%}"
            )
    return lines


_KNOB_LINES = 6


def _knob_lines(knobs: Mapping[str, Mapping[str, Any]], kept: int) -> list[str]:
    """What else was close: fields whose other value stands in one candidate share a line."""
    together: dict[str, list[str]] = {}
    for name, knob in knobs.items():
        together.setdefault(repr(sorted(knob["config"].items())), []).append(name)
    lines = []
    for names in sorted(together.values(), key=lambda names: -knobs[names[0]]["slower"]):
        knob = knobs[names[0]]
        changed = ", ".join(
            f"{name} {_shown(knobs[name]['value'])} -> {_shown(knobs[name]['other'])}"
            for name in names
        )
        lines.append(
            f"{changed}: {knob['slower']:.1%} slower, {knob['more_bytes'] / _GIB:+.1f} GiB"
        )
    told = f"the fastest of the {kept} kept candidates with another value:"
    return [told, *(f"  {line}" for line in lines[:_KNOB_LINES])] if lines else []


def _shown(value: Any) -> str:
    return str(label_of(value)) or "none"
