"""A stand-in for the package `einops`: named axes of a tensor in another order.

Only what Megatron-Core's state-space layers write: lists of names, `1`, and groups in parentheses.
"""

from __future__ import annotations

import math
import re
from typing import Any

import torch

_TOKEN = re.compile(r"\([^)]*\)|\S+")


def rearrange(tensor: Any, pattern: str, **sizes: int) -> Any:
    """`tensor` with its axes named by the left side of `pattern` and ordered by the right one."""
    left, right = (_axes(side) for side in pattern.split("->"))
    known = _sizes(left, tensor.shape, sizes)
    names = [name for group in left for name in group]
    tensor = tensor.reshape([known[name] for name in names])
    order = [names.index(name) for group in right for name in group]
    # Megatron-Core also orders arrays of ranks (parallel_state.py).
    tensor = tensor.permute(order) if isinstance(tensor, torch.Tensor) else tensor.transpose(order)
    return tensor.reshape([math.prod(known[name] for name in group) for group in right])


def repeat(tensor: torch.Tensor, pattern: str, **sizes: int) -> torch.Tensor:
    """As `rearrange`, with axes on the right that the left does not have; their sizes are given."""
    left, right = (_axes(side) for side in pattern.split("->"))
    known = _sizes(left, tensor.shape, sizes) | sizes
    names = [name for group in left for name in group]
    tensor = tensor.reshape([known[name] for name in names])
    order = [name for group in right for name in group]
    for name in order:
        if name not in names:
            tensor = tensor.unsqueeze(-1).expand(*tensor.shape, known[name])
            names.append(name)
    tensor = tensor.permute([names.index(name) for name in order])
    return tensor.reshape([math.prod(known[name] for name in group) for group in right])


def _axes(side: str) -> list[list[str]]:
    """The names of each axis; "1" has none."""
    return [
        [] if token == "1" else token.strip("()").split() for token in _TOKEN.findall(side.strip())
    ]


def _sizes(left: list[list[str]], shape: Any, given: dict[str, int]) -> dict[str, int]:
    known = dict(given)
    for group, size in zip(left, shape, strict=True):
        missing = [name for name in group if name not in known]
        rest = math.prod(known[name] for name in group if name in known)
        if missing:
            known[missing[0]] = size // rest
    return known
