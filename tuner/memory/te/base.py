"""What Transformer Engine's layers have in common (pytorch/module/base.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tuner.memory import issue
from tuner.memory.recorder import allocate
from tuner.memory.te import quantize


class TransformerEngineBaseModule(torch.nn.Module):
    """A layer that may compute in low precision and caches the low-precision weights it uses."""

    fuse_wgrad_accumulation = False
    updates_weight_copies = False
    """Whether this pass writes the cached low-precision weights anew: a step's first one does."""
    save_original_input = False

    def __init__(self) -> None:
        super().__init__()
        self.fp8_meta: dict[str, Any] = {}
        self._weight_copies: dict[str, list[torch.Tensor]] = {}
        self._delayed: list[Any] = []
        self._delayed_products: list[Callable[[], None]] = []
        self.delay_wgrad_compute = False

    def set_tensor_parallel_group(self, group: Any) -> None:
        self.tp_group = group

    def set_extra_state(self, state: Any) -> None:
        pass

    def quantized_weight(
        self, name: str, weight: torch.Tensor, cached: bool, columns: bool
    ) -> list[torch.Tensor]:
        """The low-precision copy of a weight (`get_weight_workspace`).

        It is cached from the first micro-batch on when the caller says which one it is.
        """
        if cached and name in self._weight_copies:
            if self.updates_weight_copies:
                issue.touched(weight, *self._weight_copies[name], kind="quantize")
            return self._weight_copies[name]
        copies = quantize.quantized(weight, rows=True, columns=columns)
        if cached:
            self._weight_copies[name] = copies
        return copies

    def keep_for_later(self, product: Callable[[], None], *tensors: Any) -> None:
        """Hold what a weight gradient needs until `backward_dw`, and the call that records it."""
        self._delayed.append(tensors)
        self._delayed_products.append(product)

    def need_backward_dw(self) -> bool:
        return self.delay_wgrad_compute

    def backward_dw(self) -> None:
        """Compute the weight gradients put off by `delay_wgrad_compute`."""
        if self._delayed:
            self._delayed_products.pop(0)()
            self._delayed.pop(0)


def new_parameter(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    *,
    split_dim: int | None = None,
    sequence_parallel: bool = False,
) -> torch.nn.Parameter:
    """A parameter of a layer, marked as Megatron-Core's optimizer expects."""
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


Initializer = Callable[[torch.Tensor], Any]
