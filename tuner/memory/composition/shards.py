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
    """Elements that the first data-parallel rank updates on the device.

    `chunks` holds the parameters of each model chunk in order, `shards` the ranks that share the
    optimizer state of dense and of expert parameters. `bucketed` says whether the first chunk has
    several gradient buckets, `shared` whether weights of words are tied with another rank's, which
    gives them a bucket of their own.
    """
    kept = 0
    for expert, ranks in enumerate(shards):
        pieces: list[tuple[int, int]] = []
        for number, chunk in enumerate(chunks):
            mine = [p for p in chunk if p[2] == expert]
            if sharded:
                bucket = max(_BUCKET, _BUCKET_PER_RANK * ranks)
                bucket = bucket if bucketed and number == 0 else sum(p[0] for p in mine) * 2 + 1
                pieces += _first_part(mine, ranks, bucket, shared)
            else:
                pieces += [(size, flat) for size, flat, _, _ in mine]
        kept += _kept([size for size, flat in sorted(pieces, key=lambda p: p[1])], fraction)
    return kept


def _kept(sizes: Sequence[int], fraction: float) -> int:
    """What stays on the device of parameters in the order of the optimizer."""
    threshold, moved = fraction * sum(sizes), 0
    for size in sizes:
        if moved >= threshold:
            break
        moved += size
    return sum(sizes) - moved


def _first_part(
    parameters: Sequence[Parameter], ranks: int, bucket: int, shared: bool
) -> list[tuple[int, int]]:
    """The first rank's part of a buffer: its parameters lie there in reverse order."""
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
    pieces = []
    for begin, end in pairwise(ends):
        last = begin + (end - begin) // ranks
        for first, after, flat in places:
            size = min(after, last) - max(first, begin)
            if size > 0:
                pieces.append((size, flat))
    return pieces


def _padded(number: int, divisor: int) -> int:
    return -(-number // divisor) * divisor
