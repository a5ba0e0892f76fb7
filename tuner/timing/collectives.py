"""Seconds of collectives: a latency and a bandwidth, over the links their group spans.

Volumes are those of bandwidth-optimal algorithms (Thakur et al. 2005; NCCL's rings): each rank
sends `(n - 1) / n` of the tensor in an all-gather or a reduce-scatter. Over several NVLink domains
the local ranks use all their network ports side by side (rails), so the network carries `1 / local`
of it per port.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from tuner.timing.rates import Rates
from tuner.timing.topology import Links, Span


def seconds(operation: str, size_bytes: float, span: Span, links: Links, rates: Rates) -> float:
    """Time of one collective over tensors of `size_bytes`, as `KernelLog.bytes` counts them."""
    if span.size < 2 or not size_bytes:
        return 0.0
    link = links.link_bytes_per_s * rates.link
    network = links.network_bytes_per_s * rates.network
    moved = _VOLUMES[operation](size_bytes, span, link, network)
    return _latency(operation, span, rates) + moved


def _latency(operation: str, span: Span, rates: Rates) -> float:
    once = rates.link_latency_s if span.local > 1 or operation in ("send", "recv") else 0.0
    hops = math.log2(span.domains) if span.domains > 1 else 0.0
    passes = 2.0 if operation == "all_reduce" else 1.0
    return once + passes * hops * rates.network_latency_s


def _ring(size: float, span: Span, link: float, network: float) -> float:
    """All-gather or reduce-scatter: the slower of the links inside domains and between them."""
    inside = size * (span.size - 1) / span.size / link if span.local > 1 else 0.0
    if span.domains == 1:
        return inside
    between = size * (span.domains - 1) / span.domains / (network * span.local)
    return max(inside, between)


def _twice_ring(size: float, span: Span, link: float, network: float) -> float:
    return 2.0 * _ring(size, span, link, network)


def _exchange(size: float, span: Span, link: float, network: float) -> float:
    """All-to-all: every rank sends equal parts to all others, near and far at the same time."""
    inside = size * (span.local - 1) / span.size / link
    between = size * (span.size - span.local) / span.size / network
    return max(inside, between)


def _one_way(size: float, span: Span, link: float, network: float) -> float:
    """Between neighbours of a ring, some of whom are in different domains."""
    return size / (link if span.domains == 1 else network)


_VOLUMES: dict[str, Callable[[float, Span, float, float], float]] = {
    "all_gather": _ring,
    "reduce_scatter": _ring,
    "all_reduce": _twice_ring,
    "all_to_all": _exchange,
    "broadcast": _ring,
    "send": _one_way,
    "recv": lambda size, span, link, network: 0.0,  # counted by the sender
}
