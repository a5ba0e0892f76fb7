"""What Transformer Engine's layers have in common (pytorch/module/base.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tuner.memory import issue
from tuner.memory.categories import LOW_PRECISION_WEIGHTS
from tuner.memory.recorder import allocate
from tuner.memory.te import quantize
from tuner.memory.te.primary import QuantizedTensor, primary_weight
from tuner.memory.te.quantized import WEIGHT, Quantized
from tuner.memory.te.state import filed_under


class TransformerEngineBaseModule(torch.nn.Module):
    """A layer that may compute in low precision and caches the low-precision weights it uses."""

    fuse_wgrad_accumulation = False
    updates_weight_copies = False
    """Whether this pass writes the cached low-precision weights anew: a step's first one does."""
    save_original_input = False

    def __init__(self) -> None:
        super().__init__()
        self.fp8_meta: dict[str, Any] = {}
        self._weight_copies: dict[str, Quantized] = {}
        self._quantizer_state: list[torch.Tensor] | None = None
        self._delayed: list[Any] = []
        self._delayed_products: list[Callable[[], None]] = []
        self.delay_wgrad_compute = False
        self._after_weight_gradients: list[Callable[[], None]] = []

    def set_tensor_parallel_group(self, group: Any) -> None:
        self.tp_group = group

    def set_extra_state(self, state: Any) -> None:
        pass

    def prepare_low_precision(self, products: int) -> None:
        """Make what the layer's quantisers keep, at its first pass in low precision."""
        if self._quantizer_state is None:
            with filed_under(LOW_PRECISION_WEIGHTS):
                self._quantizer_state = quantize.quantizer_state(products)

    def quantized_weight(
        self, name: str, weight: torch.Tensor, cached: bool, columns: bool
    ) -> Quantized:
        """The low-precision copy of a weight (`get_weight_workspace`).

        It is cached from the first micro-batch on when the caller says which one it is. One without
        what is read by columns is replaced where that is needed, and one that a later pass without
        gradients writes anew loses it.
        """
        if isinstance(weight, QuantizedTensor):
            if columns:
                with filed_under(LOW_PRECISION_WEIGHTS):
                    weight.copy.add_columns()
            return weight.copy
        held = self._weight_copies.get(name) if cached else None
        if held is not None and columns and held.lacks_columns:
            del held, self._weight_copies[name]
            held = None
        if held is not None:
            if self.updates_weight_copies:
                if not columns:
                    held.only_rows()
                issue.touched(weight, *held.tensors, kind="quantize")
            return held
        if not cached:
            return quantize.quantized(weight, WEIGHT, rows=True, columns=columns)
        with filed_under(LOW_PRECISION_WEIGHTS):
            copy = quantize.quantized(weight, WEIGHT, rows=True, columns=columns)
        self._weight_copies[name] = copy
        return copy

    def keep_for_later(self, product: Callable[[], None], *tensors: Any) -> None:
        """Hold what a weight gradient needs until `backward_dw`, and the call that records it."""
        self._delayed.append(tensors)
        self._delayed_products.append(product)

    def need_backward_dw(self) -> bool:
        return self.delay_wgrad_compute

    def delay_gradients(self) -> None:
        """Have data parallelism wait for `backward_dw` where weight gradients are put off."""
        if self.delay_wgrad_compute:
            for parameter in self.parameters():
                parameter.skip_backward_post_hook = True  # type: ignore[attr-defined]

    def register_wgrad_accumulation_and_reduce_hooks(self, hook: Callable[[], None]) -> None:
        self._after_weight_gradients.append(hook)

    def backward_dw(self) -> None:
        """Compute the weight gradients put off by `delay_wgrad_compute`."""
        if not self._delayed:
            return
        self._delayed_products.pop(0)()
        if not self.fuse_wgrad_accumulation:
            for name, parameter in self.named_parameters():
                if name.startswith("weight"):
                    parameter.grad = allocate(parameter.shape, parameter.dtype)
        self._delayed.pop(0)
        for hook in self._after_weight_gradients:
            hook()


def new_parameter(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    *,
    split_dim: int | None = None,
    sequence_parallel: bool = False,
) -> torch.nn.Parameter:
    """A parameter of a layer, marked as Megatron-Core's optimizer expects.

    Matrices made under `fp8_model_init` are held in low precision.
    """
    if quantize.state.parameters and len(shape) > 1:
        parameter = primary_weight(
            shape, dtype, quantize.current_recipe(), quantize.state.keeps_initial
        )
    else:
        parameter = torch.nn.Parameter(allocate(shape, dtype))
    if split_dim is not None:
        parameter.tensor_model_parallel = True  # type: ignore[attr-defined]
        parameter.partition_dim = split_dim  # type: ignore[attr-defined]
        parameter.partition_stride = 1  # type: ignore[attr-defined]
    if sequence_parallel:
        parameter.sequence_parallel = True  # type: ignore[attr-defined]
    return parameter


def rows_of(tensor: torch.Tensor) -> int:
    """Elements of all dimensions but the last."""
    return tensor.numel() // tensor.shape[-1] if tensor.numel() else 0


def group_size(group: Any) -> int:
    return 1 if group is None else torch.distributed.get_world_size(group)


def weight_columns_needed(inputs: torch.Tensor, grad_enabled: bool) -> bool:
    """Whether a low-precision weight is read by columns after this pass, or after its replay."""
    if grad_enabled and inputs.requires_grad:
        return True
    return quantize.recompute.enabled and not quantize.recompute.replaying


Initializer = Callable[[torch.Tensor], Any]
