"""Seconds of collectives: a latency and a bandwidth, over the links their group spans.

Volumes are those of bandwidth-optimal algorithms (Thakur et al. 2005; NCCL's rings): each rank
sends `(n - 1) / n` of the tensor in an all-gather or a reduce-scatter. Over several NVLink domains
the local ranks use all their network ports side by side (rails), so the network carries `1 / local`
of it per port.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from tuner.timing.rates import Rates
from tuner.timing.topology import Links, Span

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    Seconds = NDArray[np.float64]


def seconds(
    operation: str, size_bytes: ArrayLike, span: Span, links: Links, rates: Rates
) -> Seconds:
    """Time of collectives over tensors of `size_bytes`, as `KernelLog.bytes` counts them."""
    size = np.asarray(size_bytes, dtype=np.float64)
    if span.size < 2:
        return np.zeros_like(size)
    link = links.link_bytes_per_s * rates.link
    network = links.network_bytes_per_s * rates.network
    moved = _VOLUMES[operation](span, link, network) * size
    result: Seconds = np.where(size > 0, _latency(operation, span, rates) + moved, 0.0)
    return result


def _latency(operation: str, span: Span, rates: Rates) -> float:
    once = rates.link_latency_s if span.local > 1 or operation in ("send", "recv") else 0.0
    hops = math.log2(span.domains) if span.domains > 1 else 0.0
    passes = 2.0 if operation == "all_reduce" else 1.0
    return once + passes * hops * rates.network_latency_s


def _ring(span: Span, link: float, network: float) -> float:
    """All-gather or reduce-scatter: the slower of the links inside domains and between them."""
    inside = (span.size - 1) / span.size / link if span.local > 1 else 0.0
    if span.domains == 1:
        return inside
    between = (span.domains - 1) / span.domains / (network * span.local)
    return max(inside, between)


def _exchange(span: Span, link: float, network: float) -> float:
    """All-to-all: every rank sends equal parts to all others, near and far at the same time."""
    inside = (span.local - 1) / span.size / link
    between = (span.size - span.local) / span.size / network
    return max(inside, between)


def _one_way(span: Span, link: float, network: float) -> float:
    """Between neighbours of a ring, some of whom are in different domains."""
    return 1.0 / (link if span.domains == 1 else network)


_VOLUMES: dict[str, Callable[[Span, float, float], float]] = {
    "all_gather": _ring,
    "reduce_scatter": _ring,
    "all_reduce": lambda span, link, network: 2.0 * _ring(span, link, network),
    "all_to_all": _exchange,
    "broadcast": _ring,
    "send": _one_way,
    "recv": lambda span, link, network: 0.0,  # counted by the sender
}
"""Seconds for each byte: span, and bytes a second of links and of network ports."""
