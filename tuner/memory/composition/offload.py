"""When activations of offloaded layers leave the device and come back.

`cpu_offloading` moves what the first layers save for backward to the host
(transformer_engine pytorch/cpu_offload.py): until 2.9 in windows spread over the model, from 2.10
on each layer at a fixed distance.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

_BY_LAYERS_SINCE = (2, 10)


@dataclass(frozen=True, slots=True)
class Journey:
    """Layers whose activations are gone after the forward pass of a layer, and those that are back
    before the backward pass of one; by that layer."""

    gone_after: Mapping[int, int]
    back_before: Mapping[int, int]


def journey(layers: int, offloaded: int, te_version: str) -> Journey:
    """The way of the first `offloaded` of `layers` layers."""
    if _numbers(te_version) >= _BY_LAYERS_SINCE:
        distance = layers - offloaded
        return Journey(
            {layer + distance - 1: layer for layer in range(offloaded)},
            {layer + distance - 1: layer for layer in range(offloaded)},
        )
    share, extra = divmod(layers, offloaded)
    windows = {share * (layer + 1) - 1 + min(layer + 1, extra): layer for layer in range(offloaded)}
    return Journey(windows, windows)


def buffers_stay(te_version: str) -> bool:
    """Whether double buffering keeps two sets of buffers for what comes back."""
    return _numbers(te_version) < _BY_LAYERS_SINCE


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])
