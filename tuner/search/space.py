"""Search spaces: which values each tunable field may take, and under which other values.

A space is written in YAML (`search_spaces/*.yaml`):

    description: what it is for
    includes: [layout]                # other spaces, merged first
    axes:
      tensor_model_parallel_size: [1, 2, 4]
      recompute_modules:
        subsets: [core_attn, mlp]     # every subset, the empty one included unless
        min_modules: 1                # there have to be as many
        when: {recompute_granularity: selective}
      env.PYTORCH_CUDA_ALLOC_CONF: [null, "expandable_segments:True"]
    fixed:
      use_distributed_optimizer: true

An axis exists only when every field named in its `when` has one of the values given there. Any
Megatron field may be an axis; those the tuner does not model are passed through to the trainable
and still checked by the rules.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, Protocol

from tuner.candidate import DEFAULTS
from tuner.errors import InputError, nearest_name
from tuner.files import read_yaml_mapping

if TYPE_CHECKING:
    import optuna

Value = Any
_SPACE_KEYS = ("description", "includes", "axes", "fixed")
_AXIS_KEYS = ("values", "subsets", "when", "min_modules", "max_modules")


@dataclass(frozen=True, slots=True)
class Axis:
    """One field and its values, in order; `when` maps other fields to the values that enable it."""

    field: str
    values: tuple[Value, ...]
    when: tuple[tuple[str, tuple[Value, ...]], ...] = ()

    def enabled(self, chosen: Mapping[str, Value]) -> bool:
        """Whether this axis exists, given the fields chosen before it."""
        return all(chosen.get(name) in allowed for name, allowed in self.when)


class Chooser(Protocol):
    """Whatever picks one of several labelled choices: an Optuna trial, for one."""

    def suggest_categorical(self, name: str, choices: Sequence[str]) -> Any: ...


@dataclass(frozen=True, slots=True)
class _RandomChooser:
    random: Random

    def suggest_categorical(self, name: str, choices: Sequence[str]) -> str:
        return self.random.choice(choices)


@dataclass(frozen=True, slots=True)
class SearchSpace:
    """Ordered conditional axes and fixed fields. An axis's `when` names only earlier axes."""

    axes: tuple[Axis, ...]
    fixed: Mapping[str, Value] = field(default_factory=dict)
    description: str = ""

    def suggest(self, chooser: Chooser) -> dict[str, Value]:
        """One flat candidate, drawn axis by axis (define-by-run: absent axes are not asked for).

        Every choice is offered under its text label (see `label_of`), the form Optuna stores.
        """
        chosen = dict(self.fixed)
        for axis in self.axes:
            if axis.enabled(chosen):
                labels = [label_of(value) for value in axis.values]
                picked = chooser.suggest_categorical(axis.field, labels)
                chosen[axis.field] = axis.values[labels.index(picked)]
        return collect_env(chosen)

    def enumerate(self) -> Iterator[dict[str, Value]]:
        """Every flat candidate, lazily, in the order of the axes; nothing is screened."""
        return (collect_env(dict(chosen)) for chosen in self._walk(0, dict(self.fixed)))

    def _walk(self, depth: int, chosen: dict[str, Value]) -> Iterator[dict[str, Value]]:
        if depth == len(self.axes):
            yield chosen
            return
        axis = self.axes[depth]
        if not axis.enabled(chosen):
            yield from self._walk(depth + 1, chosen)
            return
        for value in axis.values:
            yield from self._walk(depth + 1, {**chosen, axis.field: value})

    def combinations(self) -> int:
        """How many points `enumerate` gives, counted without building them."""
        needed = {name for axis in self.axes for name, _ in axis.when}
        # By what has been chosen for the needed axes (values may be mappings): a value's position.
        states: dict[tuple[int, ...], tuple[dict[str, Value], int]] = {(): ({}, 1)}
        for axis in self.axes:
            grown: dict[tuple[int, ...], tuple[dict[str, Value], int]] = {}
            for state, (chosen, count) in states.items():
                choices = axis.values if axis.enabled({**self.fixed, **chosen}) else ()
                if axis.field not in needed:
                    grown[state] = (chosen, count * max(1, len(choices)))
                elif not choices:
                    grown[(*state, -1)] = (chosen, count)
                else:
                    for at, value in enumerate(choices):
                        grown[(*state, at)] = ({**chosen, axis.field: value}, count)
            states = grown
        return sum(count for _, count in states.values())

    def points(self, at_most: int, random: Random) -> Iterator[dict[str, Value]]:
        """Every point in random order, or `at_most` random draws, lazily, where there are more."""
        if self.combinations() > at_most:
            chooser = _RandomChooser(random)
            return (self.suggest(chooser) for _ in range(at_most))
        listed = list(self.enumerate())
        random.shuffle(listed)
        return iter(listed)

    def labels(self, flat: Mapping[str, Value]) -> dict[str, str]:
        """The choice of every existing axis that gives this flat candidate (`suggest` undone).

        Raises InputError where the candidate holds a value its axis does not offer.
        """
        chosen, labels = {**self.fixed, **_spread_env(flat)}, {}
        for axis in self.axes:
            if not axis.enabled(chosen):
                continue
            value = chosen.get(axis.field, _default(axis))
            if value is None and None not in axis.values:
                raise InputError(
                    "the candidate has no value for this axis of the space",
                    field=axis.field,
                    fix=f"give one of {list(axis.values)}",
                )
            chosen[axis.field] = value
            label = label_of(value)
            if label not in {label_of(offered) for offered in axis.values}:
                raise InputError(
                    f"{value!r} is not in the space",
                    field=axis.field,
                    fix=f"give one of {list(axis.values)}",
                )
            labels[axis.field] = label
        return labels

    def distributions(
        self, labels: Mapping[str, str]
    ) -> dict[str, optuna.distributions.CategoricalDistribution]:
        """What Optuna is told of these axes: every label each of them offers."""
        from optuna.distributions import CategoricalDistribution

        return {
            axis.field: CategoricalDistribution([label_of(value) for value in axis.values])
            for axis in self.axes
            if axis.field in labels
        }


def _default(axis: Axis) -> Value:
    """What a candidate that does not name the field has there: the only choice, or the default."""
    if len(axis.values) == 1:
        return axis.values[0]
    return DEFAULTS.get(axis.field)


def label_of(value: Value) -> str:
    """A value as text, one label a value: module lists joined by commas, None as "none"."""
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(sorted(str(v) for v in value)) + "]"
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return str(value)


def collect_env(chosen: dict[str, Value]) -> dict[str, Value]:
    """Move `env.NAME` axes into the candidate's `env` mapping; a None value leaves NAME unset."""
    env = dict(chosen.pop("env", None) or {})
    for name in [name for name in chosen if name.startswith("env.")]:
        value = chosen.pop(name)
        if value is not None:
            env[name.removeprefix("env.")] = value
    return {**chosen, "env": env} if env else chosen


def _spread_env(flat: Mapping[str, Value]) -> dict[str, Value]:
    spread = {name: value for name, value in flat.items() if name != "env"}
    env = flat.get("env") or {}
    return {**spread, **{f"env.{name}": value for name, value in env.items()}}


def parse_space(
    document: Mapping[str, Any],
    *,
    where: str,
    base_folder: Path | None = None,
    seen: tuple[str, ...] = (),
) -> SearchSpace:
    """The space of a YAML mapping, its includes merged first.

    `where` names the file in errors; `base_folder` resolves includes given as paths. Axes and
    fixed fields of the document replace those of the same field in its includes; an axis given as
    null removes the included one. Raises InputError with the field and the fix.
    """
    _refuse_unknown(document, _SPACE_KEYS, where)
    axes: dict[str, Axis] = {}
    fixed: dict[str, Value] = {}
    for include in _strings(document.get("includes"), where, "includes"):
        if include in seen:
            raise InputError("a space includes itself", where=where, field="includes")
        part = load_space(include, base_folder=base_folder, seen=(*seen, include))
        axes.update({axis.field: axis for axis in part.axes})
        fixed.update(part.fixed)
    for name, raw in _mapping(document.get("axes"), where, "axes").items():
        fixed.pop(name, None)
        if raw is None:
            axes.pop(name, None)
        else:
            axes[name] = _parse_axis(str(name), raw, where)
    for name, value in _mapping(document.get("fixed"), where, "fixed").items():
        axes.pop(name, None)
        fixed[str(name)] = _mapping(value, where, "fixed.env") if name == "env" else value
    description = str(document.get("description") or "")
    return SearchSpace(_in_order(axes, fixed, where), fixed, description)


def load_space(
    name: str, *, base_folder: Path | None = None, seen: tuple[str, ...] = ()
) -> SearchSpace:
    """A space by the name of a shipped one ("dense") or by the path of a YAML file."""
    if name.endswith((".yaml", ".yml")):
        path = Path(name) if base_folder is None else base_folder / name
        return parse_space(
            read_yaml_mapping(path), where=str(path), base_folder=path.parent, seen=seen
        )
    folder = shipped_folder()
    known = sorted(path.stem for path in folder.glob("*.yaml"))
    if name not in known:
        raise InputError(
            f"there is no search space '{name}'",
            field="space",
            fix=nearest_name(name, known) or f"choose one of {', '.join(known)}, or a .yaml file",
        )
    path = folder / f"{name}.yaml"
    return parse_space(read_yaml_mapping(path), where=path.name, seen=seen)


def shipped_folder() -> Path:
    """Where the installed `search_spaces` package keeps its YAML files."""
    import search_spaces

    return Path(search_spaces.__file__).parent


def _parse_axis(name: str, raw: object, where: str) -> Axis:
    place = f"axes.{name}"
    spec = raw if isinstance(raw, Mapping) else {"values": raw}
    _refuse_unknown(spec, _AXIS_KEYS, where, place)
    if ("values" in spec) == ("subsets" in spec):
        raise InputError("give either `values` or `subsets`", where=where, field=place)
    if "subsets" in spec:
        modules = _strings(spec["subsets"], where, f"{place}.subsets")
        least = _count(spec.get("min_modules"), 0, where, f"{place}.min_modules")
        most = _count(spec.get("max_modules"), len(modules), where, f"{place}.max_modules")
        values = _subsets(modules, least, most)
        if not values:
            raise InputError("no subset is left", where=where, field=place)
    else:
        given = next((name for name in ("min_modules", "max_modules") if name in spec), None)
        if given is not None:
            raise InputError("belongs to `subsets`", where=where, field=f"{place}.{given}")
        raw_values = spec["values"]
        if not isinstance(raw_values, list) or not raw_values:
            raise InputError(
                f"{raw_values!r} is not a list of values",
                where=where,
                field=place,
                fix="write [1, 2]",
            )
        values = tuple(tuple(v) if isinstance(v, list) else v for v in raw_values)
    if name == "env":
        for value in values:
            _mapping(value, where, place)
    labels = [label_of(value) for value in values]
    if len(set(labels)) != len(labels):
        raise InputError("a value stands there twice", where=where, field=place)
    when = tuple(
        (str(other), tuple(allowed) if isinstance(allowed, list) else (allowed,))
        for other, allowed in _mapping(spec.get("when"), where, f"{place}.when").items()
    )
    return Axis(name, values, when)


def _count(value: object, default: int, where: str, place: str) -> int:
    if value is None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise InputError(f"{value!r} is not a count", where=where, field=place)
    return value


def _subsets(modules: Sequence[str], least: int, most: int) -> tuple[tuple[str, ...], ...]:
    names = sorted(set(modules))
    return tuple(
        subset
        for size in range(least, min(most, len(names)) + 1)
        for subset in itertools.combinations(names, size)
    )


def _in_order(axes: Mapping[str, Axis], fixed: Mapping[str, Value], where: str) -> tuple[Axis, ...]:
    """Axes sorted so that an axis stands after those in its `when`; else in the file's order."""
    ordered: list[Axis] = []
    placed = set(fixed)
    pending = list(axes.values())
    while pending:
        ready = next((a for a in pending if all(n in placed for n, _ in a.when)), None)
        if ready is None:
            axis = pending[0]
            missing = next(n for n, _ in axis.when if n not in placed)
            hint = nearest_name(missing, [*axes, *fixed])
            raise InputError(
                f"depends on '{missing}', which is no earlier axis or fixed field of the space",
                where=where,
                field=f"axes.{axis.field}.when",
                fix=hint or "add it as an axis or under `fixed`",
            )
        pending.remove(ready)
        ordered.append(ready)
        placed.add(ready.field)
    return tuple(ordered)


def _refuse_unknown(
    document: Mapping[str, Any], known: Sequence[str], where: str, place: str = ""
) -> None:
    for key in document:
        if key not in known:
            raise InputError(
                f"unknown key '{key}'",
                where=where,
                field=place,
                fix=nearest_name(str(key), known) or f"known keys: {', '.join(known)}",
            )


def _mapping(value: object, where: str, place: str) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise InputError(f"{value!r} is not a mapping", where=where, field=place)
    return value


def _strings(value: object, where: str, place: str) -> list[str]:
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
        raise InputError(f"{value!r} is not a list of names", where=where, field=place)
    return list(value)
