"""Process groups of one rank alone: collectives that finish at once and move nothing.

Each call is recorded as an operation of the kernel log.

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
from tuner.memory import issue
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
        return original_new_group(
            ranks,
            backend="fake",
            use_local_synchronization=True,
            group_desc=options.get("group_desc"),
        )

    def send(tensor: Any, peer: Any = None, group: Any = None, *args: Any, **kwargs: Any) -> Any:
        issue.collective("send", issue.size_of([tensor]), group, asynchronous=True)
        return FinishedWork()

    def receive(tensor: Any, peer: Any = None, group: Any = None, *args: Any, **kwargs: Any) -> Any:
        issue.collective("recv", issue.size_of([tensor]), group, asynchronous=True)
        return FinishedWork()

    def batched(operations: Any) -> list[FinishedWork]:
        for operation in operations:
            function = send if operation.op is send else receive
            function(operation.tensor, None, operation.group)
        return [FinishedWork() for _ in operations]

    def all_gather_object(objects: list[Any], item: Any, group: Any = None) -> None:
        objects[:] = [item] * len(objects)

    return {
        "new_group": new_group,
        "all_reduce": _all_reduce,
        "broadcast": _broadcast,
        "reduce": _in_place,
        "all_gather_into_tensor": _gather,
        "_all_gather_base": _gather,
        "reduce_scatter_tensor": _reduce_scatter_tensor,
        "_reduce_scatter_base": _reduce_scatter_tensor,
        "all_to_all_single": _all_to_all_single,
        "all_gather": _all_gather,
        "all_to_all": _all_to_all,
        "reduce_scatter": _reduce_scatter,
        "gather": _in_place,
        "scatter": _in_place,
        "barrier": lambda *args, **kwargs: None,
        "send": lambda *args, **kwargs: send(*args, **kwargs) and None,
        "recv": lambda *args, **kwargs: receive(*args, **kwargs) and None,
        "isend": send,
        "irecv": receive,
        "batch_isend_irecv": batched,
        "all_gather_object": all_gather_object,
        "broadcast_object_list": lambda *args, **kwargs: None,
        "_coalescing_manager": _coalescing_manager,
    }


_coalesced_beside: list[bool] = []
"""For each open coalescing manager, whether its collectives run beside what follows."""


@contextmanager
def _coalescing_manager(
    group: Any = None, device: Any = None, async_ops: bool = False
) -> Iterator[_Coalescing]:
    _coalesced_beside.append(async_ops)
    try:
        yield _Coalescing()
    finally:
        _coalesced_beside.pop()


def _in_place(*args: Any, async_op: bool = False, **kwargs: Any) -> FinishedWork | None:
    return FinishedWork() if async_op else None


def _record(operation: str, tensors: Any, group: Any, async_op: bool) -> FinishedWork | None:
    beside = async_op or any(_coalesced_beside)
    issue.collective(operation, issue.size_of(tensors), group, asynchronous=beside)
    return FinishedWork() if async_op else None


def _all_reduce(
    tensor: torch.Tensor, op: Any = None, group: Any = None, async_op: bool = False
) -> FinishedWork | None:
    return _record("all_reduce", [tensor], group, async_op)


def _broadcast(
    tensor: torch.Tensor,
    src: Any = None,
    group: Any = None,
    async_op: bool = False,
    group_src: Any = None,
) -> FinishedWork | None:
    return _record("broadcast", [tensor], group, async_op)


def _reduce_scatter(
    output: torch.Tensor, inputs: Any, op: Any = None, group: Any = None, async_op: bool = False
) -> FinishedWork | None:
    return _record("reduce_scatter", inputs, group, async_op)


def _reduce_scatter_tensor(
    output: torch.Tensor,
    input: torch.Tensor,
    op: Any = None,
    group: Any = None,
    async_op: bool = False,
) -> FinishedWork | None:
    return _record("reduce_scatter", [input], group, async_op)


def _gather(
    output_tensor: torch.Tensor,
    input_tensor: torch.Tensor,
    group: Any = None,
    async_op: bool = False,
) -> FinishedWork | None:
    """All-gather into one tensor; every rank is taken to hold the same known values."""
    _same_values(output_tensor, input_tensor)
    return _record("all_gather", [output_tensor], group, async_op)


def _same_values(output: torch.Tensor, tensor: torch.Tensor) -> None:
    recorder = active_recorder()
    if recorder is not None:
        values = recorder.values
        known = values.get(tensor)
        if known is not None and tensor.dtype in (torch.int32, torch.int64) and tensor.numel():
            copies = output.numel() // tensor.numel()
            values.set(output, known.flatten().repeat(copies).view(output.shape))


def _all_gather(
    outputs: list[torch.Tensor], tensor: torch.Tensor, group: Any = None, async_op: bool = False
) -> FinishedWork | None:
    for output in outputs:
        _same_values(output, tensor)
    return _record("all_gather", outputs, group, async_op)


def _all_to_all(
    outputs: list[torch.Tensor],
    inputs: list[torch.Tensor],
    group: Any = None,
    async_op: bool = False,
) -> FinishedWork | None:
    return _record("all_to_all", inputs, group, async_op)


def _all_to_all_single(
    output: torch.Tensor,
    tensor: torch.Tensor,
    output_split_sizes: Any = None,
    input_split_sizes: Any = None,
    group: Any = None,
    async_op: bool = False,
) -> FinishedWork | None:
    if output.shape == tensor.shape:
        _same_values(output, tensor)
    return _record("all_to_all", [tensor], group, async_op)
