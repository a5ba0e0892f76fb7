"""Answers for code that reads values out of tensors that have none.

A few integers steer a training step: how many tokens go to each expert, split sizes, flags. They
are carried beside their tensors as small real tensors ("known values") and computed along with
them. Routing counts come from balanced routing: every expert receives the same share. Any other
value read is a float whose size does not matter to memory (a norm, a loss) and reads as 1.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary

from tuner.memory.errors import UnsupportedError

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.uint8)
_MAX_KNOWN = 1 << 16
"""Elements of the largest tensor whose values are carried along."""


class KnownValues:
    """Real values of small integer tensors, by tensor.

    `density` is the share of (token, expert) pairs that routing selects: top-k over the number of
    experts; None for models without experts.
    """

    def __init__(self, density: float | None) -> None:
        self.density = density
        self._values = WeakTensorKeyDictionary()

    def get(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The values of `tensor` on the CPU, where known."""
        if not tensor.is_meta:
            return tensor
        return self._values.get(tensor)

    def set(self, tensor: torch.Tensor, values: torch.Tensor) -> None:
        if tensor.is_meta and values.numel() <= _MAX_KNOWN:
            self._values[tensor] = values

    def carry(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        """Compute the values of an operator's integer `result` where those of all inputs are known.

        Cheap for the many operators that are not about integers.
        """
        if not isinstance(result, torch.Tensor) or result.dtype not in _INTEGERS:
            return
        if not self._values or result.numel() > _MAX_KNOWN:
            return
        if func.overloadpacket is torch.ops.aten.set_:  # takes a storage, which has no values
            return
        known = True

        def value(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal known
            found = self.get(tensor)
            known = known and found is not None
            return tensor if found is None else found

        real_args = tree_map_only(torch.Tensor, value, args)
        if known and real_args:
            real_kwargs = {k: v for k, v in kwargs.items() if k != "device"}
            self.set(result, func(*real_args, **real_kwargs))

    def count(self, selection_shape: torch.Size, dims: tuple[int, ...] | None = None) -> float:
        """How many pairs routing selects along `dims` (default all) of a tensor of that shape."""
        if self.density is None:
            raise UnsupportedError(
                "a selection with unknown contents is counted in a model without experts",
                field="num_moe_experts",
            )
        size = 1
        for dim in range(len(selection_shape)) if dims is None else dims:
            size *= selection_shape[dim]
        return size * self.density

    def spread(self, shape: torch.Size, total: float, dtype: torch.dtype) -> torch.Tensor:
        """`total` things spread evenly over a tensor of `shape`, larger parts first."""
        elements = max(1, shape.numel())
        whole, rest = divmod(round(total), elements)
        values = torch.full((elements,), whole, dtype=torch.int64)
        values[:rest] += 1
        return values.to(dtype).view(shape)


def item_of(values: KnownValues, tensor: torch.Tensor) -> Any:
    """What `tensor.item()` answers."""
    known = values.get(tensor)
    if known is not None:
        return known.item()
    return True if tensor.dtype is torch.bool else torch.ones((), dtype=tensor.dtype).item()


def real_copy(values: KnownValues, tensor: torch.Tensor, reader: str) -> torch.Tensor:
    """The values of a whole tensor, for `.tolist()` and `.numpy()`; raises where unknown."""
    known = values.get(tensor)
    if known is None:
        raise UnsupportedError(
            f"{reader} reads a tensor of shape {tuple(tensor.shape)} whose values the dry run does "
            "not know"
        )
    return known
