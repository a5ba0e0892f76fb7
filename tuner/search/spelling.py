"""Axes in the form the rules take: graph fields as a version spells them, `env` as one field.

The search keeps one spelling (that of Megatron-Core 0.18) and one axis for each environment
variable; rules read the fields of the version at hand and the whole environment. `spell_axes`
translates the axes of a space, `Spelling.read` the codes that come back.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tuner.candidate import Candidate, takes_cuda_graph_modules
from tuner.constraints.screening import Table
from tuner.constraints.view import UNSET
from tuner.errors import InputError
from tuner.search.space import Axis, SearchSpace, label_of

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Codes = dict[str, NDArray[np.int32]]

_ENV = "env."
_IMPL, _MODULES, _SCOPE = "cuda_graph_impl", "cuda_graph_modules", "cuda_graph_scope"
_WHOLE = "full_iteration"

RuleAxis = tuple[str, list[Any], "dict[str, list[Any]] | None"]


@dataclass(frozen=True, slots=True)
class Spelling:
    """Axes for `enumerate_valid`, combinations that do not belong to the space, and the way back.

    `pairs` maps a (implementation, scope) pair of an older version, by labels, to the pair of the
    search's spelling; `environments` are the values of the axis `env`, a mapping each.
    """

    axes: tuple[RuleAxis, ...]
    exclude: tuple[Table, ...]
    fixed: Mapping[str, Any]
    pairs: Mapping[tuple[str, str], tuple[Any, Any]]
    environments: tuple[Mapping[str, Any], ...]

    def read(self, values: dict[str, Any], codes: Codes) -> tuple[dict[str, Any], Codes]:
        """Values and codes of the rules' fields as those of the search's."""
        if self.pairs:
            values, codes = self._read_graphs(values, codes)
        if self.environments:
            values, codes = self._read_environment(values, codes)
        return values, codes

    def _read_graphs(self, values: dict[str, Any], codes: Codes) -> tuple[dict[str, Any], Codes]:
        import numpy as np

        impls = values.pop(_IMPL, [self.fixed.get(_IMPL)])
        scopes = values.pop(_SCOPE, [self.fixed.get(_SCOPE, UNSET)])
        rows = len(next(iter(codes.values())))
        none = np.zeros(rows, dtype=np.int32)
        pair = codes.pop(_IMPL, none) * len(scopes) + codes.pop(_SCOPE, none)
        found = [
            self.pairs.get((_label(impl), _label(scope)), (UNSET, UNSET))
            for impl, scope in itertools.product(impls, scopes)
        ]
        for place, name in enumerate((_IMPL, _MODULES)):
            offered = [both[place] for both in found]
            labels = list(dict.fromkeys(_label(value) for value in offered))
            first = {_label(value): value for value in reversed(offered)}
            table = np.array([labels.index(_label(v)) for v in offered], dtype=np.int32)
            values[name], codes[name] = [first[label] for label in labels], table[pair]
        return values, codes

    def _read_environment(
        self, values: dict[str, Any], codes: Codes
    ) -> tuple[dict[str, Any], Codes]:
        import numpy as np

        whole = codes.pop("env")
        del values["env"]
        for name in dict.fromkeys(itertools.chain.from_iterable(self.environments)):
            offered = [chosen.get(name) for chosen in self.environments]
            offered = [UNSET if value is None else value for value in offered]
            distinct = list(dict.fromkeys(offered))
            table = np.array([distinct.index(value) for value in offered], dtype=np.int32)
            values[name], codes[name] = distinct, table[whole]
        return values, codes


def spell_axes(space: SearchSpace, mcore: str) -> Spelling:
    """The axes of a space as the rules of Megatron-Core `mcore` read them.

    Raises InputError where an environment variable depends on another field, or where an axis tells
    graphs of layers from those of the whole iteration and the version does not.
    """
    environments = _environments(space)
    axes: list[RuleAxis] = [
        (axis.field, list(axis.values), {n: list(allowed) for n, allowed in axis.when} or None)
        for axis in space.axes
        if not axis.field.startswith(_ENV)
    ]
    fixed = dict(space.fixed)
    if environments:
        fixed.pop("env", None)
        axes.append(("env", [_as_variables(chosen) for chosen in environments], None))
    pairs: dict[tuple[str, str], tuple[Any, Any]] = {}
    exclude: tuple[Table, ...] = ()
    names = {axis.field for axis in space.axes} | set(fixed)
    if _IMPL in names and not takes_cuda_graph_modules(mcore):
        pairs = _graph_pairs(space, mcore)
        axes, fixed, exclude = _older_graphs(axes, fixed, pairs)
    return Spelling(tuple(axes), exclude, fixed, pairs, tuple(environments))


def _environments(space: SearchSpace) -> list[dict[str, Any]]:
    variables = [axis for axis in space.axes if axis.field.startswith(_ENV)]
    if not variables:
        return []
    for axis in variables:
        outside = next((name for name, _ in axis.when if not name.startswith(_ENV)), None)
        if outside is not None:
            raise InputError(
                f"depends on '{outside}'; a variable may depend on other variables only",
                field=f"axes.{axis.field}.when",
            )
    own = dict(space.fixed.get("env") or {})
    return list(_choices(variables, {f"{_ENV}{name}": value for name, value in own.items()}))


def _choices(axes: Sequence[Axis], chosen: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if not axes:
        yield chosen
    elif not axes[0].enabled(chosen):
        yield from _choices(axes[1:], chosen)
    else:
        for value in axes[0].values:
            yield from _choices(axes[1:], {**chosen, axes[0].field: value})


def _as_variables(chosen: Mapping[str, Any]) -> dict[str, Any]:
    return {name.removeprefix(_ENV): v for name, v in chosen.items() if v is not None}


def _graph_pairs(space: SearchSpace, mcore: str) -> dict[tuple[str, str], tuple[Any, Any]]:
    """Every pair of graph fields of the space, by its older spelling."""
    graphs = [axis for axis in space.axes if axis.field in (_IMPL, _MODULES)]
    start = {name: space.fixed[name] for name in (_IMPL, _MODULES) if name in space.fixed}
    pairs = {}
    for chosen in _choices(graphs, start):
        old = Candidate.from_flat(chosen).to_flat(mcore=mcore)
        impl, scope = old.get(_IMPL, "none"), old.get(_SCOPE, UNSET)
        new = (chosen.get(_IMPL, "none"), chosen.get(_MODULES, UNSET))
        pairs[_label(impl), _label(scope)] = new
    return pairs


def _older_graphs(
    axes: list[RuleAxis], fixed: dict[str, Any], pairs: Mapping[tuple[str, str], Any]
) -> tuple[list[RuleAxis], dict[str, Any], tuple[Table, ...]]:
    """The graph axes in the older spelling; pairs that mix two choices are excluded."""
    import numpy as np

    impls = list(dict.fromkeys(impl for impl, _ in pairs))
    scopes: dict[str, Any] = {}
    for (_, label), (impl, modules) in pairs.items():
        if label != _label(UNSET):
            scopes[label] = [_WHOLE] if impl == _WHOLE else list(modules)
    fixed = {name: value for name, value in fixed.items() if name not in (_IMPL, _MODULES)}
    both = {"local", _WHOLE} <= {impl for impl, _ in pairs.values()}
    result: list[RuleAxis] = []
    when_of_impl = next((when for name, _, when in axes if name == _IMPL), None)
    result.append((_IMPL, list(impls), when_of_impl))
    with_scope = [impl for impl in impls if any(i == impl and s in scopes for i, s in pairs)]
    if scopes:
        result.append((_SCOPE, list(scopes.values()), {_IMPL: with_scope}))
    for name, choices, when in axes:
        if name not in (_IMPL, _MODULES):
            result.append((name, choices, _older_condition(name, when, both)))
    if not scopes:
        return result, fixed, ()
    labels = [*scopes, _label(UNSET)]
    broken = np.array([[(impl, label) not in pairs for label in labels] for impl in impls])
    if when_of_impl is not None:
        broken = np.vstack([broken, np.zeros((1, len(labels)), dtype=np.bool_)])
    return result, fixed, (Table(("space",), (_IMPL, _SCOPE), broken),)


def _older_condition(
    name: str, when: dict[str, list[Any]] | None, both: bool
) -> dict[str, list[Any]] | None:
    allowed = (when or {}).get(_IMPL)
    if when is None or allowed is None:
        return when
    if both and ("local" in allowed) != (_WHOLE in allowed):
        raise InputError(
            "tells graphs of layers from a graph of the whole iteration, which this version of "
            "Megatron-Core spells alike",
            field=f"axes.{name}.when",
        )
    older = list(dict.fromkeys("local" if impl == _WHOLE else impl for impl in allowed))
    return {**when, _IMPL: older}


def _label(value: Any) -> str:
    return "unset" if value is UNSET else label_of(value)
