"""Which part of its parameters a rank updates on the device, when some are updated on the host.

megatron/core/optimizer/cpu_offloading/hybrid_optimizer.py moves whole parameters to the host, in
the order of the optimizer's groups, until the share asked for is reached; with the distributed
optimizer a parameter is what the rank's part of each gradient buffer holds of it
(distributed/param_and_grad_buffer.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

Parameter = tuple[int, int, int, int]
"""Elements of a parameter, and 1 where it has one dimension, where it is an expert's, and where it
has a row for each word."""

_BUCKET, _BUCKET_PER_RANK = 40_000_000, 1_000_000
_PARAMETER_ALIGNMENT, _BUCKET_ALIGNMENT = 64, 128


def on_device(
    chunks: Sequence[Sequence[Parameter]],
    shards: tuple[int, int],
    fraction: float,
    *,
    sharded: bool = True,
    bucketed: bool = False,
    shared: bool = False,
) -> int:
    """Elements that a data-parallel rank updates on the device: those of the rank with the most.

    `chunks` holds the parameters of each model chunk in order, `shards` the ranks that share the
    optimizer state of dense and of expert parameters. `bucketed` says whether the first chunk has
    several gradient buckets, `shared` whether weights of words are tied with another rank's, which
    gives them a bucket of their own.
    """
    kept: list[list[int]] = []
    for expert, ranks in enumerate(shards):
        pieces: list[list[tuple[int, int]]] = [[] for _ in range(ranks if sharded else 1)]
        for number, chunk in enumerate(chunks):
            mine = [p for p in chunk if p[2] == expert]
            if sharded:
                bucket = max(_BUCKET, _BUCKET_PER_RANK * ranks)
                bucket = bucket if bucketed and number == 0 else sum(p[0] for p in mine) * 2 + 1
                _add_parts(pieces, mine, bucket, shared)
            else:
                pieces[0] += [(size, flat) for size, flat, _, _ in mine]
        kept.append(
            [
                _kept([size for size, _ in sorted(own, key=lambda p: p[1])], fraction)
                for own in pieces
            ]
        )
    dense, experts = kept
    # Ranks beside each other share a part of the experts' state where there are fewer such parts.
    steps = max(len(dense), len(experts))
    return max(
        dense[step * len(dense) // steps] + experts[step * len(experts) // steps]
        for step in range(steps)
    )


def _kept(sizes: Sequence[int], fraction: float) -> int:
    """What stays on the device of parameters in the order of the optimizer."""
    threshold, moved = fraction * sum(sizes), 0
    for size in sizes:
        if moved >= threshold:
            break
        moved += size
    return sum(sizes) - moved


def _add_parts(
    pieces: Sequence[list[tuple[int, int]]],
    parameters: Sequence[Parameter],
    bucket: int,
    shared: bool,
) -> None:
    """Give each rank its part of a buffer: its parameters lie there in reverse order."""
    ranks = len(pieces)
    places, ends, start = [], [0], 0
    alignment = math.lcm(ranks, _BUCKET_ALIGNMENT)
    for size, flat, _, words in reversed(parameters):
        start = _padded(start, _PARAMETER_ALIGNMENT)
        apart = shared and words
        if apart and start > ends[-1]:
            start = _padded(start, alignment)
            ends.append(start)
        places.append((start, start + size, flat))
        start += size
        if apart or start - ends[-1] >= bucket:
            start = _padded(start, alignment)
            ends.append(start)
    if start > ends[-1]:
        ends.append(_padded(start, alignment))
    for begin, end in pairwise(ends):
        width = (end - begin) // ranks
        for first, after, flat in places:
            low, high = max(first, begin), min(after, end)
            if low >= high:
                continue
            for rank in range((low - begin) // width, (high - begin - 1) // width + 1):
                own = begin + rank * width
                pieces[rank].append((min(high, own + width) - max(low, own), flat))


def _padded(number: int, divisor: int) -> int:
    return -(-number // divisor) * divisor
