"""Records what a program allocates while its tensors hold no data.

Every tensor lives on PyTorch's `meta` device: it has a shape, a type and a storage with a size, and
no bytes behind it. Operators compute shapes alone, so a training step of any size runs on any
machine. `Recorder` watches the storages that operators create and writes down their birth and
death as a `Trace`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from tuner.memory.kernel_log import KernelLog, Row
from tuner.memory.known_shapes import KnownShapes
from tuner.memory.trace import Trace
from tuner.memory.values import KnownValues

Handler = Callable[["Recorder", Any, tuple[Any, ...], dict[str, Any]], Any]
"""Stands in for an operator: recorder, operator, positional and keyword arguments."""

_META = torch.device("meta")
_MAX_HOST_ELEMENTS = 1 << 20
"""Elements of the largest host tensor that holds data."""

_UNSEEN = object()

_MIXED_DEVICES = ("same device", "is not on the expected device")
"""Parts of the messages of operators that refuse host and device tensors together."""


_PYTHON_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.Python)
"""Left out, operators run without asking dispatch modes."""

_active: list[Recorder] = []


def active_recorder() -> Recorder | None:
    """The recorder that records now, or None."""
    return _active[-1] if _active else None


def allocate(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A new contiguous device tensor; what `torch.empty` does under a recorder, faster."""
    with torch._C._ExcludeDispatchKeyGuard(_PYTHON_KEYS):
        tensor = torch.empty(tuple(shape), dtype=dtype, device=_META)
    if _active:
        _active[-1].see(tensor)
    return tensor


class _Life(weakref.ref):  # type: ignore[type-arg]
    """A weak reference to a live storage, with its block number, pool and counted bytes."""

    __slots__ = ("block", "host", "key", "module", "pool", "size")
    block: int
    host: bool
    key: int
    module: int
    pool: int
    size: int


class Recorder:
    """Collects allocation events; `recording()` makes it see the operators that run.

    `host_counts` makes tensors on the `cpu` device count as well: runs on a machine without GPU
    keep everything there.
    """

    def __init__(
        self, *, host_counts: bool, handlers: dict[Any, Handler], values: KnownValues
    ) -> None:
        self.host_counts = host_counts
        self.handlers = handlers
        self.values = values
        self.module = 0
        self.phase = 0
        self.pool = 0
        self.paused = False
        self.current_bytes = 0
        self.has_host_tensors = False
        self._module_names: dict[str, int] = {"": 0}
        self._phase_names: dict[str, int] = {"": 0}
        self._lives: dict[int, _Life] = {}
        self._blocks = 0
        self._block: list[int] = []
        self._bytes: list[int] = []
        self._module: list[int] = []
        self._phase: list[int] = []
        self._pool: list[int] = []
        self._markers: list[tuple[int, str]] = []
        self._kernels: list[Row] = []
        self._kernel_markers: list[int] = []

    def module_code(self, name: str) -> int:
        """The code under which events of module `name` are filed."""
        return self._module_names.setdefault(name, len(self._module_names))

    def phase_code(self, name: str) -> int:
        return self._phase_names.setdefault(name, len(self._phase_names))

    @contextmanager
    def in_phase(self, name: str) -> Iterator[None]:
        """File events inside this context under the phase `name`."""
        before, self.phase = self.phase, self.phase_code(name)
        try:
            yield
        finally:
            self.phase = before

    @contextmanager
    def in_module(self, name: str) -> Iterator[None]:
        """File allocations inside this context under the module `name`."""
        before, self.module = self.module, self.module_code(name)
        try:
            yield
        finally:
            self.module = before

    @contextmanager
    def in_pool(self, pool: int) -> Iterator[None]:
        """Take allocations inside this context from the private pool numbered `pool`, above 0."""
        before, self.pool = self.pool, pool
        try:
            yield
        finally:
            self.pool = before

    def mark(self, name: str) -> None:
        """Set the marker `name` before the next event."""
        self._markers.append((len(self._block), name))
        self._kernel_markers.append(len(self._kernels))

    def kernel(
        self,
        kind: int,
        dtype: int = 0,
        m: int = 0,
        n: int = 0,
        k: int = 0,
        batch: int = 1,
        flops: float = 0.0,
        bytes: float = 0.0,
        op: int = 0,
        group: int = 0,
        group_size: int = 1,
        asynchronous: bool = False,
    ) -> None:
        """Record one device operation; the arguments are columns of `KernelLog`."""
        self._kernels.append(
            (
                len(self._block),
                self.phase,
                self.module,
                kind,
                dtype,
                m,
                n,
                k,
                batch,
                flops,
                bytes,
                op,
                group,
                group_size,
                asynchronous,
            )
        )

    @contextmanager
    def recording(self) -> Iterator[None]:
        """See every storage that operators create inside this context, resizes included."""
        _active.append(self)
        try:
            with _seeing_resizes(self), _RecordingMode(self):
                yield
        finally:
            _active.pop()

    def see(self, tensor: torch.Tensor) -> None:
        """Record the birth of the storage of `tensor` unless it is known already."""
        if self.paused:
            return
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self._lives or not (self.host_counts or tensor.is_meta):
            return
        self._allocate(self._known(storage), storage.nbytes())

    def borrow(self, tensor: torch.Tensor) -> None:
        """Take the storage of `tensor` for a second name of memory that is counted elsewhere."""
        self._known(tensor.untyped_storage())

    def block_of(self, tensor: torch.Tensor) -> int | None:
        """The number of the block that holds `tensor` now; None where it was never seen."""
        life = self._lives.get(id(tensor.untyped_storage()))
        return None if life is None or not life.size else life.block

    def follows(self, tensor: torch.Tensor) -> bool:
        """Whether the storage of `tensor` is known already."""
        return id(tensor.untyped_storage()) in self._lives

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Record that `storage`, if known, has given back its block and taken one of its size."""
        life = self._lives.get(id(storage))
        if life is not None and life.size != storage.nbytes():
            self._free(life)
            self._allocate(life, storage.nbytes())

    def move_to_host(self, tensor: torch.Tensor) -> None:
        """Treat the storage of `tensor` as host memory from now on."""
        life = self._lives.get(id(tensor.untyped_storage()))
        if life is not None:
            self._free(life)
            life.host = True
            self.has_host_tensors = True

    def on_host(self, tensor: object) -> bool:
        """Whether `tensor` is a tensor in host memory."""
        if not isinstance(tensor, torch.Tensor):
            return False
        if not tensor.is_meta:
            return True
        life = self._lives.get(id(tensor.untyped_storage()))
        return life is not None and life.host

    def __len__(self) -> int:
        return len(self._block)

    def trace(self) -> Trace:
        """Everything recorded so far, without categories."""
        import numpy as np

        return Trace(
            block=np.array(self._block, dtype=np.int64),
            bytes=np.array(self._bytes, dtype=np.int64),
            module=np.array(self._module, dtype=np.int32),
            phase=np.array(self._phase, dtype=np.int32),
            category=np.zeros(len(self), dtype=np.int32),
            module_names=tuple(self._module_names),
            phase_names=tuple(self._phase_names),
            category_names=("",),
            markers=tuple(self._markers),
            pool=np.array(self._pool, dtype=np.int32) if any(self._pool) else None,
            kernels=KernelLog.from_rows(self._kernels),
            kernel_markers=np.array(self._kernel_markers, dtype=np.int64),
        )

    def _known(self, storage: torch.UntypedStorage) -> _Life:
        """Follow `storage` from now on, without memory of its own yet."""
        life = _Life(storage, self._forget)
        life.key = id(storage)
        life.size = 0
        life.host = False
        self._lives[life.key] = life
        return life

    def _allocate(self, life: _Life, size: int) -> None:
        life.size = size
        if not size:
            return
        life.block = self._blocks
        life.module = self.module
        life.pool = self.pool
        self._blocks += 1
        self._add(life, size)

    def _free(self, life: _Life) -> None:
        if life.size:
            self._add(life, -life.size)
            life.size = 0

    def _add(self, life: _Life, size: int) -> None:
        self.current_bytes += size
        self._block.append(life.block)
        self._bytes.append(size)
        self._module.append(life.module)
        self._phase.append(self.phase)
        self._pool.append(life.pool)

    def _forget(self, life: Any) -> None:
        self._free(life)
        del self._lives[life.key]


class _RecordingMode(TorchDispatchMode):
    """Sends tensors to the meta device and shows the recorder each new one."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder
        self._handlers = recorder.handlers
        self._kernels: dict[Any, Any] = {}
        self._allocates: dict[Any, bool] = {}
        self._places: dict[Any, torch.device] = {}
        self._shapes = KnownShapes()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and the wrapper costs more than an operator

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if types and any(kind.__name__ == "DTensor" for kind in types):
            return NotImplemented  # it runs the operator on this rank's shard, which is seen
        kwargs = kwargs or {}
        handler = self._handlers.get(func)
        if handler is not None:
            result = handler(self._recorder, func, args, kwargs)
        else:
            device = kwargs.get("device")
            if device is not None or "device" in kwargs:
                kwargs = dict(kwargs, device=self._placed(device))
                pinned = kwargs.pop("pin_memory", False)
                made = self._without_data(func, args, kwargs, pinned=pinned)
                if made is not None:
                    return made
            result = self._run(func, args, kwargs)
            self._recorder.values.carry(func, args, kwargs, result)
        kernel = self._kernels.get(func, _UNSEEN)
        if kernel is _UNSEEN:
            kernel = self._kernels[func] = _kernel_of(func)
        if kernel is not None and not self._recorder.paused:
            kernel(self._recorder, args, kwargs, result)
        if handler is None:
            allocates = self._allocates.get(func)
            if allocates is None:
                allocates = self._allocates[func] = _may_allocate(func)
            if not allocates:
                return result
        recorder = self._recorder
        if recorder.has_host_tensors and args and recorder.on_host(args[0]):
            return self._on_host(result)
        if isinstance(result, torch.Tensor):
            recorder.see(result)
        elif isinstance(result, (list, tuple)):
            for item in result:
                if isinstance(item, torch.Tensor):
                    recorder.see(item)
        return result

    def _on_host(self, result: Any) -> Any:
        """The result of an operator on host tensors, which lies there too unless seen already."""
        recorder = self._recorder
        if recorder.host_counts or not isinstance(result, torch.Tensor) or not result.is_meta:
            return result
        if not recorder.follows(result):
            recorder.see(result)
            recorder.move_to_host(result)
        return result

    def _without_data(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, pinned: bool
    ) -> torch.Tensor | None:
        """A pinned host tensor, or one too large for its values to be of interest: without data,
        and not counted. None for all others."""
        if not pinned and (kwargs["device"] is _META or self._recorder.host_counts):
            return None
        made: torch.Tensor = func(*args, **dict(kwargs, device=_META))
        if not pinned and made.numel() <= _MAX_HOST_ELEMENTS:
            return None
        self._recorder.see(made)
        self._recorder.move_to_host(made)
        return made

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            return self._shapes.run(func, args, kwargs)
        except RuntimeError as error:
            if not any(part in str(error) for part in _MIXED_DEVICES):
                raise
        # Host tensors meet device tensors: let them all be on the device.
        return func(*tree_map_only(torch.Tensor, _on_device, args), **kwargs)

    def _placed(self, device: Any) -> torch.device:
        """Where a tensor asked for on `device` lives."""
        place = self._places.get(device)
        if place is None:
            kind = "cpu" if device is None else torch.device(device).type
            stays = kind == "cpu" and not self._recorder.host_counts
            place = self._places[device] = torch.device("cpu") if stays else _META
        return place


def _kernel_of(func: Any) -> Any:
    from tuner.memory.operators import kernel_of

    return kernel_of(func)


def _may_allocate(func: Any) -> bool:
    """Whether a result of the operator may own new storage; views and in-place ones do not."""
    if func is torch.ops.aten.lift_fresh.default:
        return True  # `torch.tensor` makes its storage before any operator runs
    return any(value.alias_info is None for value in func._schema.returns)


def _on_device(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.is_meta or tensor.dim() == 0 else torch.empty_like(tensor, device=_META)


@contextmanager
def _seeing_resizes(recorder: Recorder) -> Iterator[None]:
    """Storages are emptied and refilled by `UntypedStorage.resize_`, which is no operator."""
    original = torch.UntypedStorage.resize_

    def resize(storage: torch.UntypedStorage, size_bytes: int) -> Any:
        result = original(storage, size_bytes)
        recorder.resized(storage)
        return result

    torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = original  # type: ignore[method-assign]
