"""Results of operators that ran before on tensors of the same shapes.

Many of PyTorch's operators work out shapes in Python (torch/_refs, torch/_prims), which takes a
hundred times as long as making a tensor without data. A training step calls few distinct operators
on few distinct shapes, so the second call of each takes the shapes of the first one's result.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_leaves

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_META = torch.device("meta")
_PYTHON_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.Python)

_Shape = tuple[torch.Size, tuple[int, ...], torch.dtype]


class _NotKnownError(Exception):
    """An argument whose shape does not say what the operator makes of it."""


class KnownShapes:
    """Runs operators on meta tensors, each once for the shapes and other arguments it is given.

    Operators that return new tensors alone are meant: not those that return views or write to
    their arguments, nor those whose arguments hold data.
    """

    def __init__(self) -> None:
        self._makes_new: dict[Any, bool] = {}
        self._known: dict[Any, tuple[_Shape, ...] | None] = {}

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What `func(*args, **kwargs)` returns."""
        makes_new = self._makes_new.get(func)
        if makes_new is None:
            makes_new = self._makes_new[func] = _makes_new(func)
        if not makes_new:
            return func(*args, **kwargs)
        try:
            key = (func, torch.get_default_dtype(), _key(args), _key(kwargs) if kwargs else None)
            known = self._known.get(key, ())
        except (_NotKnownError, TypeError):
            return func(*args, **kwargs)
        if known:
            made = [_make(shape) for shape in known]
            return made[0] if len(made) == 1 else tuple(made)
        result = func(*args, **kwargs)
        if known is not None:
            self._known[key] = _shapes(result, (args, kwargs))
        return result


def _makes_new(func: Any) -> bool:
    """Whether the operator belongs to PyTorch and only returns new tensors."""
    schema = func._schema
    return (
        func.namespace == "aten"
        and bool(schema.returns)
        and not schema.is_mutable
        and all(r.alias_info is None and str(r.type) == "Tensor" for r in schema.returns)
    )


def _key(value: Any) -> Any:
    kind = type(value)
    if kind in _PLAIN:
        if not value.is_meta:
            raise _NotKnownError
        return value.shape, value.stride(), value.dtype
    if kind is tuple or kind is list:
        return tuple([_key(item) for item in value])
    if kind is dict:
        return tuple([(name, _key(item)) for name, item in value.items()])
    if isinstance(value, torch.Tensor):
        raise _NotKnownError
    return kind, value


def _shapes(result: Any, arguments: Any) -> tuple[_Shape, ...] | None:
    """The shapes of new tensors; None where one is not all of a storage of its own.

    Some operators return a view of their argument though their schema does not say so.
    """
    tensors = result if isinstance(result, (tuple, list)) else (result,)
    taken = {id(leaf.untyped_storage()) for leaf in tree_leaves(arguments) if _is_tensor(leaf)}
    for tensor in tensors:
        if type(tensor) is not torch.Tensor or not _whole(tensor):
            return None
        if id(tensor.untyped_storage()) in taken:
            return None
    return tuple((tensor.shape, tensor.stride(), tensor.dtype) for tensor in tensors)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _whole(tensor: torch.Tensor) -> bool:
    if not tensor.is_meta or tensor.storage_offset():
        return False
    spans = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * step for size, step in spans) + 1 if tensor.numel() else 0
    return tensor.untyped_storage().nbytes() == last * tensor.element_size()


def _make(shape: _Shape) -> torch.Tensor:
    size, stride, dtype = shape
    with torch._C._ExcludeDispatchKeyGuard(_PYTHON_KEYS):
        return torch.empty_strided(size, stride, dtype=dtype, device=_META)
