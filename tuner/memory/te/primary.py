"""Weights that exist in low precision alone (pytorch/tensor/*.py, tensor/utils.py).

A weight made under `fp8_model_init` looks like a tensor of its nominal type and holds low-precision
data. Megatron-Core puts that data into its parameter buffer and casts the optimizer's master
weights to it after each step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tuner.memory import issue
from tuner.memory.categories import LOW_PRECISION_WEIGHTS
from tuner.memory.errors import UnsupportedError
from tuner.memory.recorder import active_recorder, allocate
from tuner.memory.te.quantized import WEIGHT, Quantized, quantize
from tuner.memory.te.recipes import Recipe
from tuner.memory.te.state import filed_under

aten = torch.ops.aten

_VIEWS = (
    aten.alias.default,
    aten.as_strided.default,
    aten.detach.default,
    aten.expand.default,
    aten.select.int,
    aten.slice.Tensor,
    aten.t.default,
    aten.transpose.int,
    aten.view.default,
    aten._unsafe_view.default,
)


class QuantizedTensor(torch.Tensor):
    """A tensor of nominal shape and type whose storage is `copy`."""

    copy: Quantized
    is_meta = False

    @staticmethod
    def __new__(
        cls: type[QuantizedTensor], shape: Sequence[int], dtype: torch.dtype, copy: Quantized
    ) -> QuantizedTensor:
        made: QuantizedTensor = torch.Tensor._make_wrapper_subclass(
            cls, tuple(shape), dtype=dtype, device=torch.device("meta"), storage_size=0
        )
        made.copy = copy
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        source = args[0]
        if func in _VIEWS:
            shape = func(_plain(source), *args[1:], **(kwargs or {})).shape
            return type(source)(shape, source.dtype, source.copy)
        if (
            func is aten._to_copy.default
            and (kwargs or {}).get("dtype", source.dtype) == source.dtype
        ):
            return type(source)(source.shape, source.dtype, source.copy)  # it is on the device
        if func is aten.copy_.default and isinstance(source, QuantizedTensor):
            issue.touched(args[1], *source.copy.tensors, kind="quantize")
            return source
        values = [item.dequantize() if isinstance(item, QuantizedTensor) else item for item in args]
        return func(*values, **(kwargs or {}))

    def dequantize(self, *, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A new tensor of the nominal type, or of `dtype`."""
        result = allocate(self.shape, dtype or self.dtype)
        issue.touched(*self.copy.rows, result)
        return result

    @property
    def data(self) -> torch.Tensor:
        return self.detach()

    @data.setter
    def data(self, value: Any) -> None:
        self.copy = value.copy

    def update_usage(
        self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None
    ) -> None:
        """Make or free what is read by rows or by columns."""
        if columnwise_usage:
            self.copy.add_columns()
        elif columnwise_usage is False:
            self.copy.only_rows()
        if rowwise_usage is False:
            self.copy.only_columns()

    def renew_columns(self) -> None:
        """Make what is read by columns from the rows, where products need it."""
        with filed_under(LOW_PRECISION_WEIGHTS):
            self.copy.add_columns()
        issue.touched(*self.copy.tensors, kind="quantize")


def _storage(kept: str) -> Any:
    """An attribute for the data that a tensor's `copy` has in its list `kept`."""

    def read(tensor: QuantizedTensor) -> torch.Tensor | None:
        parts = getattr(tensor.copy, kept)
        if not parts:
            return None
        if parts[0].shape != tensor.shape and parts[0].numel() == tensor.numel():
            parts[0].resize_(tensor.shape)
        return parts[0]

    def put(tensor: QuantizedTensor, data: torch.Tensor | None) -> None:
        parts = getattr(tensor.copy, kept)
        if data is None:
            parts.clear()
        else:
            parts[:1] = [data]

    return property(read, put)


class Float8Tensor(QuantizedTensor):
    """One scale for the tensor."""

    _data, _transpose = _storage("rows"), _storage("columns")
    _transpose_invalid = False

    def _create_transpose(self) -> None:
        with filed_under(LOW_PRECISION_WEIGHTS):
            self.copy.make_columns()
        issue.touched(*self.copy.tensors, kind="quantize")


class MXFP8Tensor(QuantizedTensor):
    """One scale for each 32 elements."""

    _rowwise_data, _columnwise_data = _storage("rows"), _storage("columns")

    def _create_columnwise(self) -> None:
        raise UnsupportedError(
            "Megatron-FSDP asks Transformer Engine before 2.10 for columns of MXFP8 weights, which "
            "it cannot make from rows",
            field="fp8_param",
            fix="unset it, or name Transformer Engine 2.10 or later (te_version)",
        )


class Float8BlockwiseQTensor(QuantizedTensor):
    """One scale for each tile."""

    _rowwise_data, _columnwise_data = _storage("rows"), _storage("columns")
    _create_columnwise = QuantizedTensor.renew_columns


class NVFP4Tensor(QuantizedTensor):
    """Four bits an element."""


_CLASSES: dict[str, type[QuantizedTensor]] = {
    "delayed": Float8Tensor,
    "current": Float8Tensor,
    "mxfp8": MXFP8Tensor,
    "block": Float8BlockwiseQTensor,
    "nvfp4": NVFP4Tensor,
}


def primary_weight(
    shape: Sequence[int], dtype: torch.dtype, recipe: Recipe, keeps_initial: bool
) -> torch.nn.Parameter:
    """A weight in low precision (`reset_parameters`), cast from one in `dtype` that is let go.

    With `keeps_initial` the values in `dtype` stay on the host for the optimizer to start from.
    """
    initial = allocate(shape, dtype)
    with filed_under(LOW_PRECISION_WEIGHTS):
        copy = quantize(recipe, WEIGHT, shape, rows=True, columns=torch.is_grad_enabled())
    del initial
    parameter = torch.nn.Parameter(_CLASSES[recipe.kind](shape, dtype, copy))
    if keeps_initial:
        parameter.get_high_precision_init_val = lambda: _on_host(shape, dtype)  # type: ignore[attr-defined]
        parameter.clear_high_precision_init_val = lambda: None  # type: ignore[attr-defined]
    return parameter


def _on_host(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor that counts nowhere; copies of it do."""
    recorder = active_recorder()
    if recorder is None:
        return torch.empty(tuple(shape), dtype=dtype, device="meta")
    recorder.paused = True
    try:
        return allocate(shape, dtype)
    finally:
        recorder.paused = False


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the same geometry that counts nowhere."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def replace_raw_data(tensor: QuantizedTensor, new_raw_data: torch.Tensor) -> None:
    """Let the rows of a weight lie in a part of a buffer."""
    if isinstance(tensor, (MXFP8Tensor, NVFP4Tensor)):
        raise UnsupportedError(
            f"Transformer Engine cannot put a {type(tensor).__name__} into a buffer",
            field="reuse_grad_buf_for_mxfp8_param_ag",
            fix="set it to true for MXFP8; leave fp4_param unset",
        )
    tensor.copy.rows[0] = new_raw_data


def cast_master_weights_to_fp8(
    model_weights: Sequence[QuantizedTensor],
    master_weights: Sequence[torch.Tensor | None],
    start_offsets: Sequence[int | None],
    group: Any,
    fsdp_shard_model_weights: Any = None,
    manual_post_all_gather_processing: bool = False,
) -> None:
    """Cast this rank's master weights; all are rounded to the nominal type first."""
    rounded = [
        None if master is None else master.to(model.dtype)
        for model, master in zip(model_weights, master_weights, strict=True)
    ]
    maxima, scales = [], []
    for model, master in zip(model_weights, rounded, strict=True):
        tiles = model.copy.recipe.kind == "block"
        size = model.copy.rows[1].numel() // 4 if tiles else 1
        maxima.append(size)
        if tiles:
            scales.append(allocate((size,), torch.float32))
            if not manual_post_all_gather_processing:
                model.copy.only_rows()
        issue.touched(master, kind="quantize")
    packed = allocate((sum(maxima),), torch.float32)
    torch.distributed.all_reduce(packed, group=group)
    issue.touched(*rounded, *rounded, kind="quantize")


def post_all_gather_processing(model_weights: QuantizedTensor | Sequence[QuantizedTensor]) -> None:
    """Renew what is read by columns after rows have arrived (from Transformer Engine 2.10 on)."""
    if isinstance(model_weights, QuantizedTensor):
        model_weights = [model_weights]
    for weight in model_weights:
        weight.renew_columns()
