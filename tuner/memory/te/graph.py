"""Graphs of layers, captured one forward and one backward pass at a time (pytorch/graph.py).

All graphs share one private pool and are captured in the order in which the pipeline schedule will
replay them, so that a pass may use memory that an earlier one has given back. Static inputs and
gradients of outputs lie outside the pool. Outputs are let go once their backward is captured, and
gradients of inputs once the next backward is, where buffers are reused.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from tuner.memory.errors import UnsupportedError
from tuner.memory.graphs import CAPTURE, weak_reference
from tuner.memory.recorder import active_recorder
from tuner.memory.te import quantize


class _Pass:
    """One forward and backward pass of one layer over one micro-batch."""

    def __init__(self, layer: Any, precision: tuple[bool, Any], args: Any, kwargs: Any) -> None:
        self.layer, self.precision = layer, precision
        self.args, self.kwargs = args, kwargs
        self.keys = list(kwargs)
        self.outputs: tuple[torch.Tensor, ...] = ()
        self.structure: Any = None
        self.grad_outputs: tuple[Any, ...] = ()
        self.grad_inputs: tuple[Any, ...] = ()
        self.parameters: tuple[torch.Tensor, ...] = ()

    @property
    def signature(self) -> tuple[Any, ...]:
        """What another pass's static inputs must have in common to serve this one."""
        tensors = [("", tensor) for tensor in self.args] + sorted(self.kwargs.items())
        return tuple((name, tensor.shape, tensor.dtype) for name, tensor in tensors)

    def run(self) -> Any:
        enabled, recipe = self.precision
        with quantize.fp8_autocast(enabled=enabled, fp8_recipe=recipe):
            return self.layer(*self.args, **self.kwargs)

    def surface(self) -> list[torch.Tensor]:
        """Static inputs, then the parameters that get gradients."""
        user, _ = tree_flatten((self.args, [self.kwargs[key] for key in self.keys]))
        return [*user, *self.parameters]

    def gradients(self, outputs: Sequence[Any], grads: Sequence[Any], retain: bool) -> list[Any]:
        inputs = [item for item in self.surface() if item.requires_grad]
        found = torch.autograd.grad(
            [item for item in outputs if item.requires_grad],
            inputs,
            [item for item in grads if item is not None],
            only_inputs=True,
            allow_unused=True,
            retain_graph=retain,
        )
        return list(found)

    def warm_up(self) -> tuple[torch.Tensor, ...]:
        """Run once outside the pool; gives the parameters that got gradients."""
        self.parameters = tuple(self.layer.parameters())
        outputs, _ = tree_flatten(self.run())
        grads = [torch.empty_like(item) for item in outputs if item.requires_grad]
        found = self.gradients(outputs, grads, retain=False)
        of_parameters = found[len(found) - sum(item.requires_grad for item in self.parameters) :]
        trained = [item for item in self.parameters if item.requires_grad]
        for module in self.layer.modules():
            if hasattr(module, "is_first_microbatch"):
                module.is_first_microbatch = True
        return tuple(
            item for item, grad in zip(trained, of_parameters, strict=True) if grad is not None
        )

    def capture_forward(self, pool: Any) -> None:
        with torch.cuda.graph(torch.cuda.CUDAGraph(), pool=pool):
            outputs = self.run()
        flat, self.structure = tree_flatten(outputs)
        self.outputs = tuple(flat)

    def capture_backward(self, pool: Any, retain: bool) -> None:
        with torch.cuda.graph(torch.cuda.CUDAGraph(), pool=pool):
            found = iter(self.gradients(self.outputs, self.grad_outputs, retain))
        self.grad_inputs = tuple(
            next(found) if item.requires_grad else None for item in self.surface()
        )
        del found

    def forget_grad_inputs(self) -> None:
        self.grad_inputs = weak_reference(self.grad_inputs)

    def replay(self, *args: Any, **kwargs: Any) -> Any:
        user, _ = tree_flatten((args, [kwargs[key] for key in self.keys]))
        outputs = _Replay.apply(self, *user, *self.parameters)
        return tree_unflatten(outputs, self.structure)


class _Replay(torch.autograd.Function):
    """Inputs are copied into static ones, outputs and gradients are where the graph put them."""

    @staticmethod
    def forward(ctx: Any, graph: _Pass, *inputs: Any) -> tuple[torch.Tensor, ...]:
        ctx.graph = graph
        return tuple(output.detach() for output in graph.outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        return (
            None,
            *(grad if grad is None else grad.detach() for grad in ctx.graph.grad_inputs),
        )


def make_graphed_callables(
    modules: tuple[Any, ...],
    sample_args: Sequence[Any],
    num_warmup_iters: int = 3,
    allow_unused_input: bool = False,
    sample_kwargs: Sequence[dict[str, Any]] | None = None,
    fp8_enabled: bool | tuple[bool, ...] = False,
    fp8_recipe: Any = None,
    enabled: bool | tuple[bool, ...] | None = None,
    recipe: Any = None,
    _order: Sequence[float] = (),
    _num_layers_per_chunk: Sequence[int] | None = None,
    pool: Any = None,
    retain_graph_in_backward: bool = False,
    _reuse_graph_input_output_buffers: bool = False,
    **options: Any,
) -> tuple[Callable[..., Any], ...]:
    """Capture `modules` for the micro-batches of `_order`; gives one callable for each pass.

    `_order` numbers model chunks from 1, negative for backward passes; passes, like `sample_args`,
    are sorted by chunk, micro-batch and layer. Raises UnsupportedError where weight gradients are
    captured apart.
    """
    if any(math.ceil(chunk) != chunk for chunk in _order):
        raise UnsupportedError(
            "CUDA graphs with weight gradients of their own are not modelled",
            field="delay_wgrad_compute",
        )
    order = [int(chunk) for chunk in _order]
    chunks = max(order)
    layers = list(_num_layers_per_chunk or [len(modules) // chunks] * chunks)
    low = fp8_enabled if enabled is None else enabled
    flags = low if isinstance(low, tuple) else (low,) * len(modules)
    passes = _Passes(order, layers)
    chosen = recipe if recipe is not None else fp8_recipe
    for number, (args, index) in enumerate(zip(sample_args, passes.layer_of, strict=True)):
        kwargs = sample_kwargs[number] if sample_kwargs else {}
        passes.all.append(_Pass(modules[index], (flags[index], chosen), args, kwargs))
    del sample_args, sample_kwargs
    if _reuse_graph_input_output_buffers:
        passes.share_inputs()
    with _in_capture_phase():
        passes.warm_up()
        passes.capture(
            torch.cuda.graph_pool_handle() if pool is None else pool,
            retain=retain_graph_in_backward,
            reuse=_reuse_graph_input_output_buffers,
        )
    return tuple(one.replay for one in passes.all)


@contextmanager
def _in_capture_phase() -> Iterator[None]:
    recorder = active_recorder()
    assert recorder is not None  # graphs are captured in dry runs alone
    with recorder.in_phase(CAPTURE):
        yield


class _Passes:
    """All passes of a rank's layers over its micro-batches."""

    def __init__(self, order: Sequence[int], layers: Sequence[int]) -> None:
        self.order, self.layers = order, layers
        self.all: list[_Pass] = []
        micro_batches = len(order) // len(layers) // 2
        self.layer_of: list[int] = []
        self._start: list[int] = []
        first = 0
        for count in layers:
            self._start.append(len(self.layer_of))
            self.layer_of += list(range(first, first + count)) * micro_batches
            first += count

    def in_order(self) -> Iterator[tuple[bool, list[_Pass]]]:
        """The passes of each entry of the order, and whether it is a forward one."""
        done: dict[int, int] = defaultdict(int)
        for chunk in self.order:
            number = abs(chunk) - 1
            start = self._start[number] + done[chunk] * self.layers[number]
            done[chunk] += 1
            yield chunk > 0, self.all[start : start + self.layers[number]]

    def share_inputs(self) -> None:
        """Let a pass use the static inputs of one whose backward is over before it begins."""
        free: dict[Any, list[_Pass]] = defaultdict(list)
        for forward, passes in self.in_order():
            for one in passes:
                if not forward:
                    free[one.signature].append(one)
                elif free[one.signature]:
                    earlier = free[one.signature].pop(0)
                    one.args, one.kwargs = earlier.args, earlier.kwargs

    def warm_up(self) -> None:
        """Run each layer once. The real number of iterations only repeats what one allocates."""
        trained: dict[int, tuple[torch.Tensor, ...]] = {}
        for forward, passes in self.in_order():
            for one in passes if forward else ():
                key = id(one.layer)
                if key not in trained:
                    trained[key] = one.warm_up()
                one.parameters = trained[key]

    def capture(self, pool: Any, *, retain: bool, reuse: bool) -> None:
        shared: dict[Any, tuple[Any, ...]] = {}
        last_of_chunk: _Pass | None = None
        for forward, passes in self.in_order():
            if forward:
                for one in passes:
                    one.capture_forward(pool)
                continue
            previous: _Pass | None = None
            for one in reversed(passes):
                one.grad_outputs = _static_gradients(one.outputs, shared if reuse else {})
                one.capture_backward(pool, retain)
                if not reuse:
                    continue
                one.outputs = weak_reference(one.outputs)
                if previous is not None:
                    previous.forget_grad_inputs()
                previous = one
            if reuse and passes:
                if last_of_chunk is not None:
                    last_of_chunk.forget_grad_inputs()
                last_of_chunk = passes[0]


def _static_gradients(
    outputs: Sequence[torch.Tensor], shared: dict[Any, tuple[Any, ...]]
) -> tuple[Any, ...]:
    """Buffers for gradients of outputs; those of equal outputs in `shared` serve again."""
    key = tuple((item.shape, item.dtype) for item in outputs if item.requires_grad)
    if key not in shared:
        shared[key] = tuple(
            torch.empty_like(item) if item.requires_grad else None for item in outputs
        )
    return shared[key]


def nothing(*args: object, **options: object) -> None:
    """`set_capture_start`, `save_fp8_tensors` and others that allocate nothing."""
