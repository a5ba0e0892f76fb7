import torch
from hypothesis import given
from hypothesis import strategies as st

from trainables.megatron_core.hashing import stream_id, uniform
from trainables.megatron_core.weights import Shard, _fill


@given(size=st.integers(1, 8), block=st.integers(1, 5), stride=st.sampled_from([1, 2]))
def test_shards_partition_the_whole_dimension(size: int, block: int, stride: int) -> None:
    length = block * stride
    local = torch.arange(length)
    covered = torch.cat(
        [Shard(0, rank, size, stride).whole_index(local, length) for rank in range(size)]
    )
    assert sorted(covered.tolist()) == list(range(length * size))


def test_a_gated_shard_holds_its_part_of_both_halves() -> None:
    index = Shard(0, rank=1, size=2, stride=2).whole_index(torch.arange(4), 4)
    assert index.tolist() == [2, 3, 6, 7]


def shard_of(dim: int | None, rank: int, size: int, shape: tuple[int, int]) -> torch.Tensor:
    parameter = torch.nn.Parameter(torch.empty(shape))
    with torch.no_grad():
        _fill(parameter, Shard(dim, rank, size), stream=7, std=0.5)
    return parameter.data


def test_shards_put_together_are_the_whole_weight() -> None:
    whole = shard_of(None, 0, 1, (8, 6))
    rows = [shard_of(0, rank, 2, (4, 6)) for rank in range(2)]
    columns = [shard_of(1, rank, 3, (8, 2)) for rank in range(3)]
    assert torch.equal(torch.cat(rows), whole)
    assert torch.equal(torch.cat(columns, dim=1), whole)


def test_large_weights_are_filled_in_parts_without_a_seam() -> None:
    whole = shard_of(None, 0, 1, (3000, 1000))
    assert abs(whole.std().item() - 0.5) < 1e-3
    assert torch.equal(whole[2500:], shard_of(0, 5, 6, (500, 1000)))


def test_uniform_is_spread_over_the_unit_interval() -> None:
    values = uniform(torch.arange(100_000), stream=3)
    assert values.min().item() >= 0.0
    assert values.max().item() < 1.0
    assert abs(values.mean().item() - 0.5) < 5e-3
    assert abs(values.var().item() - 1 / 12) < 2e-3
    # Neighbours are unrelated.
    assert abs(torch.corrcoef(torch.stack([values[:-1], values[1:]]))[0, 1].item()) < 1e-2


def test_uniform_is_the_same_forever() -> None:
    """Losses recorded with one release can be compared with those of the next."""
    values = uniform(torch.tensor([0, 1, 2, 2**33]), stream_id(1234, "weight"))
    assert [round(value, 6) for value in values.tolist()] == [
        0.484172,
        0.014974,
        0.330631,
        0.802749,
    ]


def test_streams_are_told_apart() -> None:
    index = torch.arange(1000)
    assert not torch.equal(uniform(index, 1), uniform(index, 2))
    assert stream_id(1, "a") != stream_id(1, "b")
