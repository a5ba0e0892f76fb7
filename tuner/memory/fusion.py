"""Functions that a compiler turns into one kernel.

Megatron-Core hands its pointwise functions to `torch.compile` (megatron/core/jit.py). One kernel
allocates its outputs and nothing between; differentiated, it keeps what its backward kernel reads:
its inputs, since recomputing pointwise work is cheaper than storing it (the min-cut partition of
AOTAutograd). Elements that a function writes into an argument by index before it goes on with it
are written into a copy: a kernel of their own between two others (torch/_inductor/fx_passes/
reinplace.py, which reuses the argument only where that write is the last). `fusing()` puts a
compiler with this behaviour in the place of `torch.compile`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from trainables.megatron_core.cpu_device import replaced
from tuner.memory import issue
from tuner.memory.recorder import active_recorder, allocate


@contextmanager
def fusing() -> Iterator[None]:
    """Functions compiled inside this context become single kernels.

    To be active while Megatron-Core is imported, which is when it compiles.
    """

    def compile_function(function: Any = None, **options: object) -> Any:
        if function is None:
            return lambda later: compile_function(later, **options)
        special = _SPECIAL.get(getattr(function, "__name__", ""))
        return special or fused(function)

    with replaced(torch, compile=compile_function):
        yield


def fused(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` as one kernel; its tensor arguments may be nested in tuples and lists."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        leaves, structure = tree_flatten((args, kwargs))
        differentiated = torch.is_grad_enabled() and any(
            isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves
        )
        if differentiated:
            own = _parameters_read(function, args, kwargs)
            return _Fused.apply(function, structure, len(own), *leaves, *own)
        return _in_one_kernel(function, leaves, structure)

    return run


_read: dict[Any, tuple[torch.Tensor, ...]] = {}


def _parameters_read(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[torch.Tensor, ...]:
    """Parameters of its module that a method uses, which get gradients as its arguments do."""
    recorder = active_recorder()
    module = args[0] if args else None
    if recorder is None or not isinstance(module, torch.nn.Module):
        return ()
    key = (function, id(module))
    if key not in _read:
        plain = tree_map_only(torch.Tensor, torch.Tensor.detach, (args, kwargs))
        paused, recorder.paused = recorder.paused, True
        try:
            with torch.enable_grad():
                outputs, _ = tree_flatten(function(*plain[0], **plain[1]))
        finally:
            recorder.paused = paused
        graph = [item.grad_fn for item in outputs if isinstance(item, torch.Tensor)]
        found: dict[int, torch.Tensor] = {}
        while graph:
            node = graph.pop()
            if node is None:
                continue
            if hasattr(node, "variable"):
                found[id(node.variable)] = node.variable
            graph += [following for following, _ in node.next_functions]
        _read[key] = tuple(found.values())
    return _read[key]


@dataclass(frozen=True, slots=True)
class _Constant:
    """A result that is no tensor."""

    value: Any


class _Kernel:
    """One function compiled for one combination of shapes, types and other arguments.

    Each result is a new tensor of known shape and type, one of the arguments, or no tensor.
    `copies` are the sizes in bytes of arguments that are copied while the kernel runs.
    """

    def __init__(self, results: list[Any], structure: Any, copies: Sequence[int]) -> None:
        self._results, self._structure, self._copies = results, structure, copies

    @classmethod
    def compile(cls, function: Callable[..., Any], leaves: Sequence[Any], structure: Any) -> Any:
        """Run `function` once to see its results; None where they are no plain tensors."""
        recorder = active_recorder()
        args, kwargs = tree_unflatten(leaves, structure)
        if recorder is None:
            return None
        writes = _IndexedWrites()
        recorder.paused = True
        try:
            with writes:
                outputs, shape = tree_flatten(function(*args, **kwargs))
        finally:
            recorder.paused = False
        owners = {
            id(leaf.untyped_storage()): index
            for index, leaf in enumerate(leaves)
            if isinstance(leaf, torch.Tensor)
        }
        results: list[Any] = []
        for output in outputs:
            if not isinstance(output, torch.Tensor):
                results.append(_Constant(output))
                continue
            owner = owners.get(id(output.untyped_storage()))
            if owner is None:
                results.append((tuple(output.shape), output.dtype))
            elif leaves[owner].shape == output.shape:
                results.append(owner)
            else:
                return None
        copies = [size for storage, size in writes.continued.items() if storage in owners]
        return cls(results, shape, copies)

    def run(self, leaves: Sequence[Any]) -> Any:
        copies = [allocate((size,), torch.uint8) for size in self._copies]
        outputs: list[Any] = []
        for result in self._results:
            if isinstance(result, _Constant):
                outputs.append(result.value)
            else:
                outputs.append(leaves[result] if isinstance(result, int) else allocate(*result))
        del copies
        issue.touched(*leaves, *outputs)
        return tree_unflatten(outputs, self._structure)


_INDEXED_WRITES = (torch.ops.aten.index_put_.default, torch.ops.aten._index_put_impl_.default)


class _IndexedWrites(TorchDispatchMode):
    """Sees which storages are written by index and then written again.

    `continued` maps the id of each such storage to its bytes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.continued: dict[int, int] = {}
        self._written: dict[int, int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func._schema.is_mutable and args and isinstance(args[0], torch.Tensor):
            storage = args[0].untyped_storage()
            if func in _INDEXED_WRITES:
                self._written[id(storage)] = storage.nbytes()
            elif id(storage) in self._written:
                self.continued[id(storage)] = self._written[id(storage)]
        return result


_kernels: dict[Any, _Kernel | None] = {}


def _in_one_kernel(function: Callable[..., Any], leaves: Sequence[Any], structure: Any) -> Any:
    recorder = active_recorder()
    if recorder is None or recorder.paused:
        args, kwargs = tree_unflatten(leaves, structure)
        return function(*args, **kwargs)
    key = (function, str(structure), tuple(_signature(leaf) for leaf in leaves))
    if key not in _kernels:
        _kernels[key] = _Kernel.compile(function, leaves, structure)
    kernel = _kernels[key]
    if kernel is None:
        args, kwargs = tree_unflatten(leaves, structure)
        return function(*args, **kwargs)
    return kernel.run(leaves)


def _signature(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return (tuple(leaf.shape), leaf.dtype)
    return leaf if isinstance(leaf, Hashable) else id(leaf)


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, function: Any, structure: Any, own: int, *leaves: Any) -> Any:
        result = _in_one_kernel(function, leaves[: len(leaves) - own], structure)
        ctx.save_for_backward(*(leaf for leaf in leaves if isinstance(leaf, torch.Tensor)))
        ctx.tensors = [isinstance(leaf, torch.Tensor) for leaf in leaves]
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        saved = iter(ctx.saved_tensors)
        grads = [
            _like(next(saved), needed) if is_tensor else None
            for is_tensor, needed in zip(ctx.tensors, ctx.needs_input_grad[3:], strict=True)
        ]
        issue.touched(*ctx.saved_tensors, *gradients, *grads)
        return (None, None, None, *grads)


def _like(tensor: torch.Tensor, needed: bool) -> torch.Tensor | None:
    return allocate(tensor.shape, tensor.dtype) if needed else None


class _BiasDropoutAdd(torch.autograd.Function):
    """fusions/fused_bias_dropout.py: linear but for the mask, which is all that is kept."""

    @staticmethod
    def forward(ctx: Any, inputs: Any, bias: Any, residual: torch.Tensor, prob: float) -> Any:
        ctx.dropped, ctx.has_bias = prob > 0.0, bias is not None
        ctx.dtypes = inputs.dtype, residual.dtype
        if ctx.dropped:
            ctx.save_for_backward(allocate(inputs.shape, torch.bool))
        if ctx.has_bias:
            ctx.bias_shape, ctx.bias_dtype = bias.shape, bias.dtype
        result = allocate(inputs.shape, inputs.dtype)
        issue.touched(inputs, residual, result)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        gradient = gradients[0]
        if ctx.dropped:
            issue.touched(gradient, gradient, *ctx.saved_tensors)
        inputs = allocate(gradient.shape, gradient.dtype) if ctx.dropped else gradient
        bias = None
        if ctx.has_bias:
            bias = allocate(ctx.bias_shape, ctx.bias_dtype)
        residual = gradient if ctx.dtypes[1] is gradient.dtype else gradient.to(ctx.dtypes[1])
        return inputs, bias, residual, None


def bias_dropout_add(x_with_bias: Any, residual: torch.Tensor, prob: float) -> torch.Tensor:
    """Residual plus dropped-out sum of input and bias."""
    inputs, bias = x_with_bias
    result: torch.Tensor = _BiasDropoutAdd.apply(inputs, bias, residual, prob)
    return result


def _gated(normed: torch.Tensor, gate: torch.Tensor, activation: Any, dtype: Any) -> torch.Tensor:
    return (normed * activation(gate.float())).to(dtype)


_gate = fused(_gated)


def gated_norm(layer: Any, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """ssm/gated_delta_net.py `_apply_gated_norm`: Transformer Engine's norm breaks the graph."""
    normed = layer.out_norm(x.reshape(-1, x.shape[-1]))
    result: torch.Tensor = _gate(normed, gate.reshape(-1, gate.shape[-1]), layer.act_fn, x.dtype)
    return result


_SPECIAL: dict[str, Callable[..., Any]] = {
    "bias_dropout_add_fused_train": bias_dropout_add,
    "_apply_gated_norm": gated_norm,
}
