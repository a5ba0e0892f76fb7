"""State-space kernels of the packages mamba_ssm and causal_conv1d, as Mamba layers call them.

Read from mamba_ssm 2.2.6: ops/triton/ssd_combined.py (`MambaSplitConv1dScanCombinedFn`) and
ops/triton/layernorm_gated.py. The scan keeps its input and its output before the gate; backward
computes the convolution and the states of all chunks again.
"""

from __future__ import annotations

from typing import Any

import torch

from tuner.memory import issue
from tuner.memory.errors import UnsupportedError
from tuner.memory.recorder import allocate

VERSION = "2.2.6"


class _Sizes:
    """Shapes of one scan: batch, length, chunks, heads, head width, groups, state width."""

    def __init__(
        self, projected: torch.Tensor, conv_weight: torch.Tensor, heads: int, **options: Any
    ):
        self.batch, self.length, _ = projected.shape
        self.heads, self.width = heads, options["headdim"]
        self.groups, self.chunk = options["ngroups"], options["chunk_size"]
        self.inner = self.heads * self.width
        self.conv = conv_weight.shape[0]
        self.state = (self.conv - self.inner) // self.groups // 2
        self.chunks = -(-self.length // self.chunk)
        self.dtype = projected.dtype

    def by_token(self, width: int, dtype: torch.dtype) -> torch.Tensor:
        return allocate((self.batch, self.length, width), dtype)

    def by_step(self) -> torch.Tensor:
        """One float32 for each token and head: step sizes and decays."""
        return allocate((self.batch, self.heads, self.chunks, self.chunk), torch.float32)

    def states(self, dtype: torch.dtype) -> torch.Tensor:
        """One state for each chunk and head."""
        shape = (self.batch, self.chunks, self.heads, self.width, self.state)
        return allocate(shape, dtype)

    def final_states(self) -> torch.Tensor:
        return allocate((self.batch, self.heads, self.width, self.state), torch.float32)

    def products(self) -> torch.Tensor:
        """Products of input and output maps within each chunk."""
        shape = (self.batch, self.chunks, self.groups, self.chunk, self.chunk)
        return allocate(shape, torch.float32)

    def splits(self) -> int:
        """Parts in which gradients of the maps are summed over heads (`nheads_per_program`)."""
        ratio = self.heads // self.groups
        processors = torch.cuda.get_device_properties(0).multi_processor_count
        blocks = -(-self.batch * self.chunks * self.heads // processors)
        return -(-ratio // max(1, min(blocks, ratio)))


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        projected: torch.Tensor,
        conv_weight: torch.Tensor,
        conv_bias: torch.Tensor,
        step_bias: torch.Tensor,
        decay: torch.Tensor,
        skip: torch.Tensor,
        options: dict[str, Any],
    ) -> torch.Tensor:
        sizes = _Sizes(projected, conv_weight, skip.shape[0], **options)
        convolved = _convolution(projected, sizes)
        steps = [sizes.by_step(), sizes.by_step()]
        states = _chunk_states(sizes, sizes.dtype)
        products = sizes.products()
        output = sizes.by_token(sizes.inner, sizes.dtype)
        before_gate = sizes.by_token(sizes.inner, sizes.dtype)
        _record_scan(sizes, projected, convolved, products, output, before_gate)
        del convolved, steps, states, products
        ctx.save_for_backward(
            projected, conv_weight, conv_bias, before_gate, decay, skip, step_bias
        )
        ctx.options = options
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        projected, conv_weight, conv_bias, _, decay, skip, step_bias = ctx.saved_tensors
        sizes = _Sizes(projected, conv_weight, skip.shape[0], **ctx.options)
        gradient = gradients[0].contiguous()
        convolved = _convolution(projected, sizes)
        projected_gradient = allocate(projected.shape, projected.dtype)
        conv_gradient = sizes.by_token(sizes.conv, sizes.dtype)
        _scan_backward(sizes, gradient)
        issue.touched(projected, projected_gradient, conv_gradient, convolved)
        parameters = [allocate(p.shape, p.dtype) for p in (conv_weight, conv_bias)]
        small = [allocate(p.shape, torch.float32) for p in (step_bias, decay, skip)]
        return (projected_gradient, *parameters, *small, None)


def _convolution(projected: torch.Tensor, sizes: _Sizes) -> torch.Tensor:
    """The causal convolution of a slice of the projection, copied first where it is misaligned
    (`rearrange_and_update_stride`)."""
    aligned = projected.stride(1) % 8 == 0
    source = None if aligned else sizes.by_token(sizes.conv, sizes.dtype)
    result = sizes.by_token(sizes.conv, sizes.dtype)
    issue.touched(result, result, kind="memory")
    del source
    return result


def _chunk_states(sizes: _Sizes, dtype: torch.dtype) -> list[torch.Tensor]:
    """States at the start of each chunk in `dtype`, and the final ones."""
    within = sizes.states(torch.float32)
    passed = [sizes.states(dtype), sizes.final_states()]
    issue.touched(within, within, *passed)
    issue.gemm(
        sizes.width,
        sizes.state,
        sizes.chunk,
        sizes.dtype,
        batch=sizes.batch * sizes.chunks * sizes.heads,
        output_bytes=4,
    )
    return passed


def _record_scan(sizes: _Sizes, *tensors: torch.Tensor) -> None:
    """Products within chunks, and of chunks with the states before them."""
    inside = sizes.batch * sizes.chunks
    issue.gemm(
        sizes.chunk,
        sizes.chunk,
        sizes.state,
        sizes.dtype,
        batch=inside * sizes.groups,
        output_bytes=4,
    )
    for inner in (sizes.chunk, sizes.state):
        issue.gemm(sizes.chunk, sizes.width, inner, sizes.dtype, batch=inside * sizes.heads)
    issue.touched(*tensors)


def _scan_backward(sizes: _Sizes, gradient: torch.Tensor) -> None:
    """What `_mamba_chunk_scan_combined_bwd` allocates, in its order; all of it is freed again."""
    steps = [sizes.by_token(sizes.heads, sizes.dtype), sizes.by_step(), sizes.by_step()]
    products = sizes.products()
    states = _chunk_states(sizes, torch.float32)
    gated = allocate(gradient.shape, gradient.dtype)
    state_gradients = sizes.states(torch.float32)
    passed = [sizes.states(sizes.dtype), sizes.states(sizes.dtype)]
    del state_gradients, states
    step_gradient = sizes.by_step()
    maps = [_summed_map_gradient(sizes), _summed_map_gradient(sizes)]
    splits = sizes.splits()
    parts = allocate((splits, *products.shape), torch.float32)
    summed = allocate(products.shape, torch.float32)
    del parts
    decays = [sizes.by_step() for _ in range(3)]
    inside = sizes.batch * sizes.chunks
    for _ in range(2):
        _record_scan(sizes, gated, products, *maps)
        issue.gemm(
            sizes.width,
            sizes.state,
            sizes.chunk,
            sizes.dtype,
            batch=inside * sizes.heads,
            output_bytes=4,
        )
    del steps, passed, step_gradient, summed, decays


def _summed_map_gradient(sizes: _Sizes) -> torch.Tensor:
    """The gradient of an input or output map, summed over parts of the heads."""
    width = sizes.groups * sizes.state
    parts = sizes.by_token(sizes.splits() * width, torch.float32)
    total = sizes.by_token(width, torch.float32)
    del parts
    return total


def mamba_split_conv1d_scan_combined(
    zxbcdt: torch.Tensor,
    conv1d_weight: torch.Tensor,
    conv1d_bias: torch.Tensor,
    dt_bias: torch.Tensor,
    A: torch.Tensor,  # noqa: N803 - the package's names
    D: torch.Tensor,  # noqa: N803
    chunk_size: int,
    headdim: int | None = None,
    ngroups: int = 1,
    rmsnorm_weight: Any = None,
    **options: Any,
) -> torch.Tensor:
    """Convolution, scan and gate of a Mamba layer, from `[b, l, projected]` to `[b, l, inner]`."""
    if rmsnorm_weight is not None or D.dim() != 1:
        raise UnsupportedError("a Mamba layer with the norm in its scan is not modelled")
    sizes = {"chunk_size": chunk_size, "headdim": headdim, "ngroups": ngroups}
    result: torch.Tensor = _Scan.apply(zxbcdt, conv1d_weight, conv1d_bias, dt_bias, A, D, sizes)
    return result


class _GroupNorm(torch.autograd.Function):
    """Keeps the input and one statistic for each row and group."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, weight: torch.Tensor, groups: int) -> torch.Tensor:
        output = allocate(inputs.shape, inputs.dtype)
        rows = inputs.numel() // inputs.shape[-1]
        statistics = allocate((groups * rows,), torch.float32)
        ctx.save_for_backward(inputs, weight, statistics)
        ctx.groups = groups
        issue.touched(inputs, output)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        inputs, weight, _ = ctx.saved_tensors
        gradient = allocate(inputs.shape, inputs.dtype)
        processors = torch.cuda.get_device_properties(0).multi_processor_count
        group_size = weight.shape[0] // ctx.groups
        warps = min(max(group_size // 256, 1), 8)
        parts = -(-processors * -(-4 // warps) // ctx.groups)
        partial = allocate((parts, weight.shape[0]), torch.float32)
        issue.touched(inputs, gradients[0], gradient, partial)
        del partial
        return gradient, allocate(weight.shape, weight.dtype), None


class RMSNorm(torch.nn.Module):
    """RMSNorm over groups of the width (layernorm_gated.py)."""

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        group_size: int | None = None,
        norm_before_gate: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.groups = hidden_size // (group_size or hidden_size)
        self.weight = torch.nn.Parameter(allocate((hidden_size,), dtype or torch.float32))
        self.register_parameter("bias", None)

    def forward(self, x: torch.Tensor, z: torch.Tensor | None = None) -> torch.Tensor:
        if z is not None:
            raise UnsupportedError("a Mamba norm with a gate is not modelled")
        result: torch.Tensor = _GroupNorm.apply(x, self.weight, self.groups)
        return result


def _unmodelled(*args: Any, **options: Any) -> Any:
    raise UnsupportedError(
        "Mamba layers are modelled with their memory-efficient scan only",
        field="use_mamba_mem_eff_path",
        fix="set it to true",
    )


class _Convolution(torch.autograd.Function):
    """`causal_conv1d_fn` alone: keeps its input."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, weight: torch.Tensor, bias: Any) -> torch.Tensor:
        output = allocate(inputs.shape, inputs.dtype)
        ctx.save_for_backward(inputs, weight, bias)
        issue.touched(inputs, output)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        inputs, weight, bias = ctx.saved_tensors
        gradient = gradients[0].contiguous()
        result = allocate(inputs.shape, inputs.dtype)
        issue.touched(inputs, gradient, result)
        bias_gradient = None if bias is None else allocate(bias.shape, bias.dtype)
        return result, allocate(weight.shape, weight.dtype), bias_gradient


def causal_conv1d_fn(
    x: torch.Tensor, weight: torch.Tensor, bias: Any = None, **options: Any
) -> torch.Tensor:
    result: torch.Tensor = _Convolution.apply(x, weight, bias)
    return result


def modules() -> dict[str, dict[str, Any]]:
    """Names of every module of the stand-ins, by module."""
    from tuner.memory.te import rearrange

    triton = "mamba_ssm.ops.triton"
    return {
        "einops": {"rearrange": rearrange.rearrange, "repeat": rearrange.repeat},
        "mamba_ssm": {"__version__": VERSION},
        "mamba_ssm.ops": {},
        triton: {},
        f"{triton}.selective_state_update": {"selective_state_update": _unmodelled},
        f"{triton}.layernorm_gated": {"RMSNorm": RMSNorm},
        f"{triton}.ssd_combined": {
            "mamba_chunk_scan_combined": _unmodelled,
            "mamba_split_conv1d_scan_combined": mamba_split_conv1d_scan_combined,
        },
        "causal_conv1d": {
            "__version__": "1.5.2",
            "causal_conv1d_fn": causal_conv1d_fn,
            "causal_conv1d_update": _unmodelled,
        },
        "causal_conv1d.causal_conv1d_varlen": {"causal_conv1d_varlen_states": _unmodelled},
    }
