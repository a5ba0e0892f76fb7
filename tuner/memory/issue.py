"""Recording of device operations by code that stands in for kernels.

Each function adds one operation to the active recorder's kernel log, and does nothing without one.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from tuner.memory.kernel_log import FORMAT, GROUP, KIND, OPERATION, group_code
from tuner.memory.recorder import active_recorder

FORMATS = {
    torch.float32: FORMAT["fp32"],
    torch.bfloat16: FORMAT["bf16"],
    torch.float16: FORMAT["fp16"],
    torch.float64: FORMAT["fp64"],
}
_RECIPE_FORMATS = {
    "delayed": "fp8_delayed",
    "current": "fp8_current",
    "block": "fp8_block",
    "mxfp8": "mxfp8",
    "nvfp4": "nvfp4",
}


def format_of(dtype: torch.dtype, recipe: Any = None) -> int:
    """The code of the arithmetic on tensors of `dtype`, or of a low-precision recipe's."""
    if recipe is not None:
        return FORMAT[_RECIPE_FORMATS.get(recipe.kind, "fp8_current")]
    return FORMATS.get(dtype, FORMAT["integer"])


def gemm(
    m: int,
    n: int,
    k: int,
    dtype: torch.dtype,
    *,
    recipe: Any = None,
    batch: int = 1,
    grouped: bool = False,
    output_bytes: float = 2,
) -> None:
    """`batch` products `[m, k] x [k, n]`; `output_bytes` for each element of the result."""
    recorder = active_recorder()
    if recorder is None or recorder.paused or not m * n * k * batch:
        return
    operand = dtype.itemsize if recipe is None else recipe.element_bytes
    recorder.kernel(
        KIND["grouped_gemm" if grouped else "gemm"],
        format_of(dtype, recipe),
        m,
        n,
        k,
        batch,
        2.0 * m * n * k * batch,
        batch * ((m + n) * k * operand + m * n * output_bytes),
    )


def memory(moved_bytes: float, kind: str = "memory") -> None:
    """One bandwidth-bound kernel that reads and writes `moved_bytes` together."""
    recorder = active_recorder()
    if recorder is not None and not recorder.paused:
        recorder.kernel(KIND[kind], bytes=float(moved_bytes))


def touched(*tensors: torch.Tensor | None, kind: str = "memory") -> None:
    """One bandwidth-bound kernel that reads or writes each of `tensors` once."""
    memory(size_of(tensors), kind)


def size_of(tensors: Iterable[Any]) -> int:
    """Bytes of the tensors among `tensors`."""
    return sum(
        tensor.numel() * tensor.element_size()
        for tensor in tensors
        if isinstance(tensor, torch.Tensor)
    )


def attention(
    forward: bool,
    *,
    query_rows: int,
    key_rows: int,
    pairs: float,
    heads: int,
    query_width: int,
    value_width: int,
    dtype: torch.dtype,
    moved_bytes: float,
    recipe: Any = None,
) -> None:
    """Fused attention of `heads` heads over all sequences; `pairs` of rows meet in each head.

    The forward pass multiplies scores and values; the backward pass computes the scores again and
    three more products of a query's width and one more of a value's (Dao 2022, algorithm 4).
    """
    recorder = active_recorder()
    if recorder is None or recorder.paused:
        return
    widths = query_width + value_width if forward else 3 * query_width + 2 * value_width
    recorder.kernel(
        KIND["attention_forward" if forward else "attention_backward"],
        format_of(dtype, recipe),
        query_rows,
        key_rows,
        query_width,
        heads,
        2.0 * pairs * heads * widths,
        float(moved_bytes),
    )


def collective(
    operation: str,
    moved_bytes: float,
    group: Any,
    *,
    asynchronous: bool = False,
    group_name: str | None = None,
) -> None:
    """A collective over `group` (None: all ranks); nothing where the group is one rank."""
    recorder = active_recorder()
    if recorder is None or recorder.paused:
        return
    size = torch.distributed.get_world_size(group)
    if size < 2:
        return
    description = getattr(group, "group_desc", "") if group is not None else ""
    recorder.kernel(
        KIND["collective"],
        bytes=float(moved_bytes),
        op=OPERATION[operation],
        group=GROUP[group_name] if group_name else group_code(description),
        group_size=size,
        asynchronous=asynchronous,
    )
