"""What PyTorch's operators cost a device: products by shape, everything else by bytes moved.

`kernel_of` gives, for an operator, the function that records its calls, or None where nothing runs
on the device (views, allocations). The bytes of a memory-bound operator are those of the tensors
it reads and writes, each once; operators that fetch rows of a table touch only those rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from tuner.memory.issue import FORMATS
from tuner.memory.kernel_log import FORMAT, KIND

if TYPE_CHECKING:
    from tuner.memory.recorder import Recorder

Kernel = Callable[["Recorder", tuple[Any, ...], dict[str, Any], Any], None]
"""Records a finished call: recorder, positional and keyword arguments, result."""

_FREE = frozenset(
    (
        "empty",
        "empty_like",
        "empty_strided",
        "new_empty",
        "new_empty_strided",
        "_unsafe_view",
        "lift_fresh",
        "set_",
        "resize_",
        "record_stream",
        "equal",
    )
)
"""Operators without a kernel, though their schema does not call them views."""

_WRITES_ONLY = frozenset(
    ("zero_", "fill_", "zeros", "ones", "full", "arange", "new_zeros", "new_ones", "new_full")
    + ("zeros_like", "ones_like", "full_like", "uniform_", "normal_", "bernoulli_", "scalar_tensor")
)
_FETCHES_ROWS = frozenset(("embedding", "index_select", "index", "gather", "masked_select", "take"))

_MEMORY, _PERMUTE, _GEMM = KIND["memory"], KIND["permute"], KIND["gemm"]
_HOST_COPY, _HOST_MEMORY, _SYNCHRONIZE = (
    KIND["host_copy"],
    KIND["host_memory"],
    KIND["synchronize"],
)
_INTEGER = FORMAT["integer"]


def kernel_of(func: Any) -> Kernel | None:
    """How calls of the operator `func` are recorded; None where no kernel runs."""
    name = func._schema.name.rpartition("::")[2]
    if name in _PRODUCTS:
        return _PRODUCTS[name]
    if name == "_local_scalar_dense":
        return _reading
    if name in _FREE or func.is_view:
        return None
    if name in _WRITES_ONLY:
        return _writing
    if name in _FETCHES_ROWS:
        return _fetching
    if name in ("copy_", "_to_copy"):
        return _copying
    return _moving


def _moving(recorder: Recorder, args: Any, kwargs: Any, result: Any) -> None:
    total = 0
    for arg in args:
        if isinstance(arg, torch.Tensor):
            total += arg.numel() * arg.element_size()
        elif isinstance(arg, (list, tuple)):
            total += _bytes_of(arg)
    _memory(recorder, total + _bytes_of(result), args)


def _writing(recorder: Recorder, args: Any, kwargs: Any, result: Any) -> None:
    _memory(recorder, _bytes_of(result), args)


def _fetching(recorder: Recorder, args: Any, kwargs: Any, result: Any) -> None:
    if isinstance(result, torch.Tensor) and result.is_meta:
        recorder.kernel(_PERMUTE, bytes=2.0 * result.numel() * result.element_size())


def _copying(recorder: Recorder, args: Any, kwargs: Any, result: Any) -> None:
    source = args[1] if len(args) > 1 and isinstance(args[1], torch.Tensor) else args[0]
    sides = recorder.on_host(source), recorder.on_host(result)
    if recorder.host_counts or not any(sides):
        _memory(recorder, _bytes_of(source) + _bytes_of(result), args)
    elif sides == (True, True):
        if source.is_meta:
            recorder.kernel(_HOST_MEMORY, bytes=float(_bytes_of(source) + _bytes_of(result)))
    else:
        recorder.kernel(_HOST_COPY, bytes=float(min(_bytes_of(source), _bytes_of(result))))


def _reading(recorder: Recorder, args: Any, kwargs: Any, result: Any) -> None:
    """A value read on the host: the host waits for everything issued before."""
    if args[0].is_meta and not recorder.host_counts and not recorder.on_host(args[0]):
        recorder.kernel(_SYNCHRONIZE)


def _memory(recorder: Recorder, size: int, args: Any) -> None:
    if not size:
        return
    if recorder.has_host_tensors and args and recorder.on_host(_first_tensor(args)):
        recorder.kernel(_HOST_MEMORY, bytes=float(size))
    else:
        recorder.kernel(_MEMORY, bytes=float(size))


def _first_tensor(args: Any) -> Any:
    first = args[0]
    return first[0] if isinstance(first, (list, tuple)) and first else first


def _bytes_of(value: Any) -> int:
    """Bytes of a device tensor or of those in a list."""
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size() if value.is_meta else 0
    if isinstance(value, (list, tuple)):
        return sum(_bytes_of(item) for item in value)
    return 0


def _product(first: int, second: int) -> Kernel:
    """A matrix product whose operands stand at these positions of the arguments."""

    def record(recorder: Recorder, args: Any, kwargs: Any, result: Any) -> None:
        left, right = args[first], args[second]
        *batches, m, k = left.shape
        n = right.shape[-1]
        batch = batches[0] if batches else 1
        if not m * n * k * batch:
            return
        size = left.element_size() * batch * (m * k + k * n)
        recorder.kernel(
            _GEMM,
            FORMATS.get(left.dtype, _INTEGER),
            m,
            n,
            k,
            batch,
            2.0 * m * n * k * batch,
            float(size + _bytes_of(result)),
        )

    return record


_PRODUCTS: dict[str, Kernel] = {
    "mm": _product(0, 1),
    "bmm": _product(0, 1),
    "addmm": _product(1, 2),
    "baddbmm": _product(1, 2),
}
