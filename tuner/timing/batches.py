"""Kernels of larger micro-batches, from those of one sequence and of two.

The same operations are launched whatever the micro-batch; rows, heads of all sequences, FLOPs and
bytes grow by as much with each sequence, or not at all. What their times are does not grow evenly:
products of few rows leave multiprocessors idle. So operations are continued, and then timed.
"""

from __future__ import annotations

from dataclasses import replace
from difflib import SequenceMatcher
from typing import TYPE_CHECKING, Any

from tuner.memory.kernel_log import KernelLog
from tuner.timing.units import ModelKernels, UnitKernels

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_COUNTS = ("m", "n", "k", "batch")
_GROWING = (*_COUNTS, "flops", "bytes")
_SAME = ("kind", "dtype", "op", "group")


def with_batch(single: ModelKernels, twice: ModelKernels, batch: int) -> ModelKernels | None:
    """The kernels of `batch` sequences, growing as `single`, of one, does to `twice`, of two.

    A second sequence may add operations (copies of what lay in order before), but take none away:
    None where it does, or where the units of the two are not the same.
    """
    units: dict[str, UnitKernels] = {}
    for name, one in single.units.items():
        two = twice.units.get(name)
        if two is None:
            return None
        forward = _continued(one.forward, two.forward, batch)
        backward = _continued(one.backward, two.backward, batch)
        if forward is None or backward is None:
            return None
        units[name] = replace(two, forward=forward, backward=backward)
    return replace(single, units=units, hidden_bytes=single.hidden_bytes * batch)


def _continued(one: KernelLog, two: KernelLog, batch: int) -> KernelLog | None:
    import numpy as np

    place = _places(one, two)
    if place is None:
        return None
    known = place >= 0
    grown: dict[str, Any] = {}
    for name in _GROWING:
        second = np.asarray(getattr(two, name), dtype=np.float64)
        first = np.where(known, getattr(one, name)[place], 0)
        # An operation that only several sequences have is there for each of them.
        new = second if name in _COUNTS else second * batch / 2
        values = np.where(known, first + (batch - 1) * (second - first), new).clip(min=0.0)
        grown[name] = np.rint(values).astype(np.int64) if name in _COUNTS else values
    return replace(two, **grown)


def _places(one: KernelLog, two: KernelLog) -> NDArray[np.int64] | None:
    """For each operation of two sequences the place of the same one of one, -1 where it is new."""
    import numpy as np

    if all(np.array_equal(getattr(one, name), getattr(two, name)) for name in _SAME):
        return np.arange(len(two))
    first, second = (
        list(zip(*(getattr(log, name).tolist() for name in _SAME), strict=True))
        for log in (one, two)
    )
    place = np.full(len(two), -1)
    for tag, i1, i2, j1, j2 in SequenceMatcher(a=first, b=second, autojunk=False).get_opcodes():
        if tag == "equal":
            place[j1:j2] = np.arange(i1, i2)
        elif tag != "insert":
            return None
    return place
