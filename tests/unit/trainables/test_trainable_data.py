import pytest

from trainables.megatron_core.layout import Layout

SEQ, VOCAB, BATCH = 16, 100, 8


@pytest.fixture(scope="module", autouse=True)
def megatron_core() -> None:
    from trainables.megatron_core.cpu_device import without_compilation

    with without_compilation():
        import megatron.core.models.gpt  # noqa: F401


def global_batch(world_size: int, micro_batch_size: int, stream: int = 1) -> list[tuple]:
    """All sequences of one step, from every data-parallel rank, in any order."""
    import torch
    from megatron.core import parallel_state

    from trainables.megatron_core.data import microbatches

    layout = Layout.from_config({"micro_batch_size": micro_batch_size}, world_size, BATCH)
    sequences = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parallel_state, "get_context_parallel_world_size", lambda: 1)
        patch.setattr(parallel_state, "get_context_parallel_rank", lambda: 0)
        for rank in range(world_size):
            for batch in microbatches(layout, rank, SEQ, VOCAB, stream, torch.device("cpu")):
                assert batch["tokens"].shape == (micro_batch_size, SEQ)
                assert batch["position_ids"].tolist() == [list(range(SEQ))] * micro_batch_size
                pairs = zip(batch["tokens"].tolist(), batch["labels"].tolist(), strict=True)
                sequences += [(tuple(t), tuple(label)) for t, label in pairs]
    return sorted(sequences)


def test_every_layout_reads_the_same_global_batch() -> None:
    reference = global_batch(1, 1)
    assert len(set(reference)) == BATCH
    for world_size, micro_batch_size in [(1, 8), (2, 2), (4, 1), (8, 1)]:
        assert global_batch(world_size, micro_batch_size) == reference


def test_labels_are_the_next_tokens() -> None:
    for tokens, labels in global_batch(1, 1):
        assert tokens[1:] == labels[:-1]
        assert all(0 <= token < VOCAB for token in tokens + labels)


def test_steps_and_seeds_have_their_own_data() -> None:
    assert global_batch(1, 1, stream=1) != global_batch(1, 1, stream=2)
