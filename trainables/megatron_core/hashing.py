"""Numbers in [0, 1) computed from an index: the same on every device, rank and layout."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_MASK = 0xFFFFFFFF


def stream_id(*parts: object) -> int:
    """A 32-bit number that tells apart sequences of `uniform`, from any printable parts."""
    return zlib.crc32("/".join(map(str, parts)).encode())


def uniform(index: torch.Tensor, stream: int) -> torch.Tensor:
    """Float32 values in [0, 1) for int64 `index`, of any shape.

    Counter-based, so that any part of a large tensor can be computed alone. The mixing is the
    32-bit finaliser with multipliers 0x7feb352d and 0x846ca68b found by Chris Wellons
    (https://nullprogram.com/blog/2018/07/31/).
    """
    value = (index ^ (index >> 32) * 0x9E3779B9) & _MASK
    for salt in (stream, 0):
        value ^= salt
        value ^= value >> 16
        value = (value * 0x7FEB352D) & _MASK
        value ^= value >> 15
        value = (value * 0x846CA68B) & _MASK
        value ^= value >> 16
    return (value >> 8).float() * 2.0**-24
