"""Exact memory of a run on the CPU: every tensor storage, from birth to death.

Resident memory of a process says nothing about a GPU: it holds libraries, and freed memory stays.
Here each storage that an operator returns is counted while it lives, in the blocks of 512 bytes
that PyTorch's CUDA caching allocator hands out. The figure is the same in every run.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

BLOCK_BYTES = 512
"""Smallest allocation of the CUDA caching allocator (`kMinBlockSize`, CUDACachingAllocator)."""


class _Life(weakref.ref):  # type: ignore[type-arg]
    """A weak reference to a storage, with the bytes it is counted for."""

    __slots__ = ("size_bytes",)
    size_bytes: int


class StorageTracker:
    """Counts the bytes of live storages and their peak while `tracking()` is active.

    Storages born before are not seen; those born inside are followed to their end even after the
    context has closed.
    """

    def __init__(self) -> None:
        self.current_bytes = 0
        self.peak_bytes = 0
        self._lives: dict[int, _Life] = {}

    def reset_peak(self) -> None:
        """Forget the peak so far; storages alive now stay counted."""
        self.peak_bytes = self.current_bytes

    @contextmanager
    def tracking(self) -> Iterator[None]:
        """Follow every storage that operators create inside this context."""
        with ExitStack() as stack:
            stack.enter_context(self._resizes_seen())
            stack.enter_context(_TrackingMode(self))
            yield

    def see(self, tensor: torch.Tensor) -> None:
        """Count the storage of `tensor` unless it is counted already."""
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self._lives:
            return
        life = _Life(storage, self._forgetter(key))
        life.size_bytes = 0
        self._lives[key] = life
        self._resize(life, storage.nbytes())

    def _forgetter(self, key: int) -> Callable[[Any], None]:
        def forget(life: Any) -> None:
            self.current_bytes -= life.size_bytes
            del self._lives[key]

        return forget

    def _resize(self, life: _Life, size_bytes: int) -> None:
        rounded = -(-size_bytes // BLOCK_BYTES) * BLOCK_BYTES
        self.current_bytes += rounded - life.size_bytes
        life.size_bytes = rounded
        self.peak_bytes = max(self.peak_bytes, self.current_bytes)

    @contextmanager
    def _resizes_seen(self) -> Iterator[None]:
        """Output-discarding recompute (`CheckpointWithoutOutput` in tensor_parallel/random.py)
        empties and refills storages by `UntypedStorage.resize_`, which is not an operator."""
        original = torch.UntypedStorage.resize_

        def resize(storage: torch.UntypedStorage, size_bytes: int) -> Any:
            result = original(storage, size_bytes)
            life = self._lives.get(id(storage))
            if life is not None:
                self._resize(life, size_bytes)
            return result

        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            torch.UntypedStorage.resize_ = original  # type: ignore[method-assign]


class _TrackingMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Shows the tracker each tensor an operator returns."""

    def __init__(self, tracker: StorageTracker) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tracker = tracker

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here; the guard against it would import the compiler."""
        return False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Any = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "c10d":
            return _run_collective(func, args, kwargs)
        result = func(*args, **kwargs)
        if isinstance(result, torch.Tensor):
            self._tracker.see(result)
        elif isinstance(result, (list, tuple)):
            for item in result:
                if isinstance(item, torch.Tensor):
                    self._tracker.see(item)
        return result


_RECEIVES = ("recv_", "recv_any_source_")
_SENDS = ("send",)


def _run_collective(func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    """Communicate from uncounted copies, so that no thread of Gloo keeps a counted tensor alive.

    Gloo's threads let go of a tensor some time after the collective has finished, which would make
    the moment of a free, and so the peak, a matter of luck. Collectives end inside this call;
    sends return at once, receives work on the real tensor and are waited for by the caller.
    """
    name = func._schema.name.rpartition("::")[2]
    if name in _RECEIVES:
        return func(*args, **kwargs)
    from torch._C._distributed_c10d import FakeWork, Work

    # Inputs and outputs may be parts of one buffer, so whole storages are copied, once each.
    storages: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
    originals: dict[int, torch.Tensor] = {}

    def copied(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        storage = value.untyped_storage()
        if id(storage) not in storages:
            storages[id(storage)] = (storage, storage.clone())  # type: ignore[no-untyped-call]
        _, copy = storages[id(storage)]
        twin = torch.empty(0, dtype=value.dtype)
        twin.set_(copy, value.storage_offset(), value.size(), value.stride())
        originals[id(twin)] = value
        return twin

    copied_args, copied_kwargs = tree_map(copied, (args, kwargs))
    result = func(*copied_args, **copied_kwargs)
    if name in _SENDS:
        return result

    def finished(value: Any) -> Any:
        if isinstance(value, torch.ScriptObject):
            Work.unbox(value).wait()
            # The caller waits as well, which would make some works copy their buffers again.
            return FakeWork().boxed()
        return originals.get(id(value), value)

    results = tree_map(finished, result)
    for storage, copy in storages.values():
        storage.copy_(copy)
    return results
