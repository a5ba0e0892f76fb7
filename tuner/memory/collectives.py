"""Process groups of one rank alone: collectives that finish at once and move nothing.

The calls allocate what the real ones allocate, which is nothing: Megatron-Core and Transformer
Engine make the output buffers themselves. They must be in place before Megatron-Core is imported,
since some of its modules bind the functions of `torch.distributed` then.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from trainables.megatron_core.cpu_device import replaced
from tuner.memory.recorder import active_recorder


class FinishedWork:
    """The handle of a collective that has finished."""

    def wait(self, timeout: object = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


class _Coalescing:
    """What `_coalescing_manager` yields; one handle for all collectives inside."""

    def wait(self) -> None:
        pass


@contextmanager
def lonely_rank(rank: int, world_size: int) -> Iterator[None]:
    """Be rank `rank` of a job of `world_size` without any peers inside this context."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def collectives_finish_at_once() -> Any:
    """A context in which collectives do nothing; also groups without this rank cost nothing."""
    replacements = _replacements()
    return _replaced_in((dist, c10d), replacements)


@contextmanager
def _replaced_in(modules: tuple[Any, ...], replacements: dict[str, Any]) -> Iterator[None]:
    with (
        replaced(modules[0], **replacements),
        replaced(
            modules[1],
            **{name: value for name, value in replacements.items() if hasattr(modules[1], name)},
        ),
    ):
        yield


def _replacements() -> dict[str, Any]:
    original_new_group = dist.new_group

    def new_group(ranks: Any = None, **options: Any) -> Any:
        if ranks is not None and dist.get_rank() not in ranks:
            return dist.GroupMember.NON_GROUP_MEMBER
        return original_new_group(ranks, backend="fake", use_local_synchronization=True)

    def send_recv(tensor: Any, *args: Any, **kwargs: Any) -> FinishedWork:
        return FinishedWork()

    def all_gather_object(objects: list[Any], item: Any, group: Any = None) -> None:
        objects[:] = [item] * len(objects)

    return {
        "new_group": new_group,
        "all_reduce": _in_place,
        "broadcast": _in_place,
        "reduce": _in_place,
        "all_gather_into_tensor": _gather,
        "_all_gather_base": _gather,
        "reduce_scatter_tensor": _unequal,
        "_reduce_scatter_base": _unequal,
        "all_to_all_single": _all_to_all_single,
        "all_gather": _all_gather,
        "all_to_all": _unequal,
        "reduce_scatter": _unequal,
        "gather": _in_place,
        "scatter": _in_place,
        "barrier": lambda *args, **kwargs: None,
        "send": lambda *args, **kwargs: None,
        "recv": lambda *args, **kwargs: None,
        "isend": send_recv,
        "irecv": send_recv,
        "batch_isend_irecv": lambda operations: [FinishedWork() for _ in operations],
        "all_gather_object": all_gather_object,
        "broadcast_object_list": lambda *args, **kwargs: None,
        "_coalescing_manager": _coalescing_manager,
    }


@contextmanager
def _coalescing_manager(
    group: Any = None, device: Any = None, async_ops: bool = False
) -> Iterator[_Coalescing]:
    yield _Coalescing()


def _in_place(*args: Any, async_op: bool = False, **kwargs: Any) -> FinishedWork | None:
    return FinishedWork() if async_op else None


_unequal = _in_place


def _gather(
    output: torch.Tensor,
    tensor: torch.Tensor,
    group: Any = None,
    async_op: bool = False,
) -> FinishedWork | None:
    """All-gather into one tensor; every rank is taken to hold the same known values."""
    recorder = active_recorder()
    if recorder is not None:
        values = recorder.values
        known = values.get(tensor)
        if known is not None and tensor.dtype in (torch.int32, torch.int64) and tensor.numel():
            copies = output.numel() // tensor.numel()
            values.set(output, known.flatten().repeat(copies).view(output.shape))
    return FinishedWork() if async_op else None


def _all_gather(
    outputs: list[torch.Tensor], tensor: torch.Tensor, group: Any = None, async_op: bool = False
) -> FinishedWork | None:
    for output in outputs:
        _gather(output, tensor)
    return FinishedWork() if async_op else None


def _all_to_all_single(
    output: torch.Tensor,
    tensor: torch.Tensor,
    output_split_sizes: Any = None,
    input_split_sizes: Any = None,
    group: Any = None,
    async_op: bool = False,
) -> FinishedWork | None:
    if output.shape == tensor.shape:
        _gather(output, tensor)
    return FinishedWork() if async_op else None
