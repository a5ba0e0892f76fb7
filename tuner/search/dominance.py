"""Which candidates an out-of-memory result rules out besides the one that ran.

Only settings whose effect on a rank's peak has one sign by construction count. A longer pipeline,
more model chunks, a larger micro-batch or other parallel sizes do not: they move the peak to other
stages, other moments and other block sizes, and a larger one of them has been seen to fit where a
smaller one did not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tuner.candidate import DEFAULTS, Candidate
from tuner.search.table import fields_of

Fields = Mapping[str, Any]


def needs_at_least(other: Candidate, one: Candidate) -> bool:
    """Whether `other` provably needs at least the memory that `one` needs.

    True where they differ only in settings that save memory in `one` and not, or less, in `other`.
    """
    a, b = _with_defaults(one), _with_defaults(other)
    names = {name for name in a.keys() | b.keys() if a.get(name) != b.get(name)}
    for fields, saves_less in _ORDERS:
        concerned = names & fields
        if concerned:
            if not saves_less(a, b):
                return False
            names -= concerned
    return not names


def _with_defaults(candidate: Candidate) -> dict[str, Any]:
    return {**DEFAULTS, "env": None, "extra": None, **fields_of(candidate)}


def _recomputes_less(one: Fields, other: Fields) -> bool:
    """Every activation that `other` recomputes, `one` recomputes too."""
    kept = other["recompute_granularity"]
    if kept is None:
        return True
    if one["recompute_granularity"] != kept:
        return False
    if kept == "selective":
        return set(other["recompute_modules"]) <= set(one["recompute_modules"])
    if one["recompute_method"] != "block" or other["recompute_method"] != "block":
        return False
    if bool(other["distribute_saved_activations"]) > bool(one["distribute_saved_activations"]):
        return False
    return int(other["recompute_num_layers"] or 0) <= int(one["recompute_num_layers"] or 0)


def _offloads_fewer_layers(one: Fields, other: Fields) -> bool:
    return bool(one["cpu_offloading"]) and _layers_offloaded(other) <= _layers_offloaded(one)


def _layers_offloaded(fields: Fields) -> int:
    return int(fields["cpu_offloading_num_layers"]) if fields["cpu_offloading"] else 0


def _keeps_more_optimizer_state(one: Fields, other: Fields) -> bool:
    return _fraction_offloaded(other) <= _fraction_offloaded(one)


def _fraction_offloaded(fields: Fields) -> float:
    return float(fields["optimizer_offload_fraction"]) if fields["optimizer_cpu_offload"] else 0.0


def _loses(name: str) -> Callable[[Fields, Fields], bool]:
    """`one` has a saving that `other` has not."""
    return lambda one, other: bool(one[name]) and not other[name]


_ORDERS: tuple[tuple[frozenset[str], Callable[[Fields, Fields], bool]], ...] = (
    (
        frozenset(
            {
                "recompute_granularity",
                "recompute_method",
                "recompute_num_layers",
                "recompute_modules",
                "distribute_saved_activations",
            }
        ),
        _recomputes_less,
    ),
    (frozenset({"cpu_offloading", "cpu_offloading_num_layers"}), _offloads_fewer_layers),
    (
        frozenset({"optimizer_cpu_offload", "optimizer_offload_fraction"}),
        _keeps_more_optimizer_state,
    ),
    (frozenset({"use_distributed_optimizer"}), _loses("use_distributed_optimizer")),
    (frozenset({"sequence_parallel"}), _loses("sequence_parallel")),
)
"""Groups of fields, and whether going from `one` to `other` in them can only cost memory."""
