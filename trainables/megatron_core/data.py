"""Mock training data: a function of seed, step and sequence index alone.

Every layout of ranks and micro-batches reads the same global batch, so that losses of different
candidates can be compared. Tokens are skewed towards small ids, which gives the model something to
learn within a few steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from trainables.megatron_core.hashing import uniform

if TYPE_CHECKING:
    import torch

    from trainables.megatron_core.layout import Layout


def batch_tokens(
    first_sequence: int, num_sequences: int, seq_length: int, vocab_size: int, stream: int
) -> torch.Tensor:
    """Token ids of consecutive sequences, int64 `[num_sequences, seq_length + 1]`.

    `first_sequence` is the index within the step's global batch, `stream` tells apart seeds and
    steps.
    """
    import torch

    width = seq_length + 1
    start = first_sequence * width
    index = torch.arange(start, start + num_sequences * width)
    skewed = uniform(index, stream) ** 3 * vocab_size
    return skewed.long().clamp_(max=vocab_size - 1).view(num_sequences, width)


def microbatches(
    layout: Layout,
    data_parallel_rank: int,
    seq_length: int,
    vocab_size: int,
    stream: int,
    device: torch.device,
) -> Iterator[dict[str, torch.Tensor]]:
    """The micro-batches of one data-parallel rank for one step.

    Each has `tokens`, `labels` and `position_ids`, int64 `[micro_batch_size, seq_length]`; under
    context parallelism only this rank's part of the sequences.
    """
    import torch
    from megatron.core.utils import get_batch_on_this_cp_rank

    size = layout.micro_batch_size
    positions = torch.arange(seq_length, device=device)
    for microbatch in range(layout.num_microbatches):
        first = (microbatch * layout.data_parallel_size + data_parallel_rank) * size
        tokens = batch_tokens(first, size, seq_length, vocab_size, stream).to(device)
        batch = {
            "tokens": tokens[:, :-1].contiguous(),
            "labels": tokens[:, 1:].contiguous(),
            "position_ids": positions.expand(size, seq_length),
        }
        yield get_batch_on_this_cp_rank(batch)
