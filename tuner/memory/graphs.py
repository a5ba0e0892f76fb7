"""CUDA graphs in a dry run: captures take memory from private pools, replays take none.

Megatron-Core's own code decides what is captured when (transformer/cuda_graphs.py,
full_cuda_graph.py) and Transformer Engine's how (`te/graph.py`). Here is what both ask of PyTorch
(torch/cuda/graphs.py): a capture runs its work once with an allocator pool of its own. Blocks freed
under capture may serve later captures of the same pool and nothing else, for as long as a graph
lives, so that a pool keeps what it ever held at once.
"""

from __future__ import annotations

import itertools
import weakref
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from trainables.megatron_core.cpu_device import replaced
from tuner.memory.recorder import Recorder, active_recorder
from tuner.memory.trace import EMPTY_CACHE

CAPTURE = "graph capture"
"""Phase of work that is captured outside the pipeline schedule."""

STEPS = 3
"""Steps of a dry run with graphs: one without optimizer state, one with it, one of replays."""

_EAGER_STEPS = {"transformer_engine": 2, "full_iteration": 2, "local": 1}


def uses_graphs(fields: Mapping[str, Any]) -> bool:
    """Whether a flat configuration asks for any CUDA graph."""
    return (fields.get("cuda_graph_impl") or "none") != "none"


def with_early_capture(fields: Mapping[str, Any]) -> dict[str, Any]:
    """`fields` with as few eager steps before the capture as show all that they allocate.

    `local` graphs are captured in the first step, after as many trial runs of each layer.
    """
    scope = fields.get("cuda_graph_scope") or fields.get("cuda_graph_modules") or ()
    names = scope.split(",") if isinstance(scope, str) else list(scope)
    whole = "full_iteration" in names
    implementation = "full_iteration" if whole else fields["cuda_graph_impl"]
    return dict(fields, cuda_graph_warmup_steps=_EAGER_STEPS.get(implementation, 2))


class _Graph:
    """`torch.cuda.CUDAGraph`: remembers its pool; replaying it allocates nothing."""

    def __init__(self, keep_graph: bool = False) -> None:
        self._pool = 0

    def register_generator_state(self, state: object) -> None:
        pass

    def replay(self) -> None:
        pass

    def reset(self) -> None:
        pass

    def pool(self) -> tuple[int, int]:
        return (0, self._pool)


class _RandomState:
    """A generator whose state is never used (`torch.Generator` on CUDA)."""

    def manual_seed(self, seed: int) -> None:
        pass

    def clone_state(self) -> _RandomState:
        return self

    def get_state(self) -> _RandomState:
        return self

    def set_state(self, state: object) -> None:
        pass

    graphsafe_get_state = get_state
    graphsafe_set_state = set_state


class _Addresses:
    """Stands for `Tensor.data_ptr` of tensors without data: one range for each storage."""

    _RANGE = 1 << 44

    def __init__(self) -> None:
        self._ranges: dict[int, int] = {}
        self._numbers = itertools.count(1)

    def of(self, tensor: torch.Tensor) -> int:
        return self._base(tensor) + int(tensor.storage_offset()) * tensor.element_size()

    def share(self, tensor: torch.Tensor, other: torch.Tensor) -> None:
        """Let `other`, without storage of its own, lie where `tensor` lies."""
        self._set(other, self.of(tensor))

    def _base(self, tensor: torch.Tensor) -> int:
        key = id(tensor.untyped_storage())
        if key not in self._ranges:
            self._set(tensor, next(self._numbers) * self._RANGE)
        return self._ranges[key]

    def _set(self, tensor: torch.Tensor, base: int) -> None:
        storage = tensor.untyped_storage()
        self._ranges[id(storage)] = base
        weakref.finalize(storage, self._ranges.pop, id(storage), None)


_addresses: list[_Addresses] = []


def weak_reference(item: Any) -> Any:
    """pytorch/utils.py `make_weak_ref`: the same memory, which it does not keep alive."""
    if isinstance(item, (tuple, list)):
        return type(item)(weak_reference(part) for part in item)
    if isinstance(item, dict):
        return {name: weak_reference(part) for name, part in item.items()}
    recorder = active_recorder()
    if recorder is None or not isinstance(item, torch.Tensor) or not item.is_meta:
        return item
    recorder.paused = True
    try:
        reference = torch.empty(item.shape, dtype=item.dtype, device="meta")
    finally:
        recorder.paused = False
    recorder.borrow(reference)
    _addresses[-1].share(item, reference)
    known = recorder.values.get(item)
    if known is not None:
        recorder.values.set(reference, known)
    return reference


@contextmanager
def graphs_can_be_captured(recorder: Recorder) -> Iterator[None]:
    """What torch.cuda offers for graphs, and what else code around captures asks of a device."""
    pools = itertools.count(1)

    @contextmanager
    def capture(graph: Any, pool: Any = None, **options: object) -> Iterator[None]:
        recorder.mark(EMPTY_CACHE)  # so does `torch.cuda.graph`
        graph._pool = next(pools) if pool is None else pool[1]
        with recorder.in_pool(graph._pool), recorder.in_phase(CAPTURE):
            yield

    outside: list[int] = []

    def begin_allocating(device: Any, pool: tuple[int, int]) -> None:
        outside.append(recorder.pool)
        recorder.pool = pool[1]

    def end_allocating(device: Any, pool: tuple[int, int]) -> None:
        recorder.pool = outside.pop()

    addresses = _Addresses()
    data_ptr = torch.Tensor.data_ptr

    def address(tensor: torch.Tensor) -> int:
        return addresses.of(tensor) if tensor.is_meta else data_ptr(tensor)

    with ExitStack() as stack:
        stack.enter_context(
            replaced(
                torch.cuda,
                CUDAGraph=_Graph,
                graph=capture,
                graph_pool_handle=lambda: (0, next(pools)),
                is_current_stream_capturing=lambda: recorder.pool != 0,
                default_generators=(_RandomState(),),
                memory_stats=lambda device=None: defaultdict(int),
                set_stream=lambda stream: None,
                empty_cache=lambda: recorder.mark(EMPTY_CACHE),
            )
        )
        stack.enter_context(
            replaced(
                torch._C,
                _cuda_beginAllocateCurrentThreadToPool=begin_allocating,
                _cuda_endAllocateToPool=end_allocating,
            )
        )
        stack.enter_context(replaced(torch.Tensor, data_ptr=address))
        stack.enter_context(_random_states_are_graph_safe())
        _addresses.append(addresses)
        stack.callback(_addresses.pop)
        yield


@contextmanager
def _random_states_are_graph_safe() -> Iterator[None]:
    """tensor_parallel/random.py keeps generators, not tensors, where graphs use its tracker."""
    from megatron.core.tensor_parallel import random

    plain_get, plain_set = random._get_cuda_rng_state, random._set_cuda_rng_state

    def get_state(device: object = None, clone: bool = False, graph_safe: bool = False) -> Any:
        return _RandomState() if graph_safe else plain_get(device)

    def set_state(new_state: Any, device: object = -1, graph_safe: bool = False) -> None:
        if isinstance(new_state, torch.Tensor):
            plain_set(new_state)

    with replaced(random, _get_cuda_rng_state=get_state, _set_cuda_rng_state=set_state):
        yield
