import torch

from trainables.megatron_core.memory import BLOCK_BYTES, StorageTracker


def blocks(tracker: StorageTracker) -> int:
    assert tracker.current_bytes % BLOCK_BYTES == 0
    return tracker.current_bytes // BLOCK_BYTES


def test_storages_count_in_blocks_while_they_live() -> None:
    tracker = StorageTracker()
    with tracker.tracking():
        one = torch.zeros(1)
        assert blocks(tracker) == 1
        two = torch.zeros(BLOCK_BYTES // 4 + 1)
        assert blocks(tracker) == 3
        del one
        assert blocks(tracker) == 2
    del two
    assert tracker.current_bytes == 0
    assert tracker.peak_bytes == 3 * BLOCK_BYTES


def test_views_and_in_place_operators_take_no_memory() -> None:
    tracker = StorageTracker()
    with tracker.tracking():
        base = torch.zeros(256)
        view = base.view(16, 16)[2:]
        view.add_(1)
        assert blocks(tracker) == 2
        del base
        assert blocks(tracker) == 2
        del view
        assert blocks(tracker) == 0


def test_what_autograd_keeps_is_counted_until_backward() -> None:
    tracker = StorageTracker()
    with tracker.tracking():
        weight = torch.zeros(128, requires_grad=True)
        loss = (weight.exp() * 2).sum()
        held = blocks(tracker)
        loss.backward()
        del loss
        assert held == 3  # weight, the saved exponential, the loss
        assert blocks(tracker) == 2  # weight and its gradient


def test_resetting_the_peak_keeps_what_is_alive() -> None:
    tracker = StorageTracker()
    with tracker.tracking():
        kept = torch.zeros(128)
        torch.zeros(1280).sum()
        tracker.reset_peak()
    assert tracker.peak_bytes == BLOCK_BYTES
    assert kept.numel() == 128


def test_emptied_and_refilled_storages_are_followed() -> None:
    """As output-discarding recompute does it."""
    original = torch.UntypedStorage.resize_
    tracker = StorageTracker()
    with tracker.tracking():
        tensor = torch.zeros(1280)
        tensor.untyped_storage().resize_(0)
        assert tracker.current_bytes == 0
        tensor.untyped_storage().resize_(1280 * 4)
        assert blocks(tracker) == 10
    assert torch.UntypedStorage.resize_ is original


def test_a_storage_that_outlives_the_tracking_is_still_released() -> None:
    tracker = StorageTracker()
    with tracker.tracking():
        tensor = torch.zeros(128)
    unseen = torch.zeros(128)
    assert blocks(tracker) == 1
    del tensor
    assert tracker.current_bytes == 0
    assert unseen.numel() == 128


def test_collectives_compute_the_same_and_are_not_counted() -> None:
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        tracker = StorageTracker()
        with tracker.tracking():
            buffer = torch.arange(256.0)
            torch.distributed.all_reduce(buffer[:128])
            # Input and output are parts of one buffer, as in the distributed optimizer.
            torch.distributed.reduce_scatter_tensor(buffer[:128], buffer[:128])
            gathered = torch.zeros(128)
            torch.distributed.all_gather_into_tensor(gathered, buffer[128:])
            assert blocks(tracker) == 3
            work = torch.distributed.all_reduce(gathered, async_op=True)
            assert work is not None
            work.wait()
        assert buffer.tolist() == list(range(256))
        assert gathered.tolist() == list(range(128, 256))
        assert tracker.peak_bytes == 3 * BLOCK_BYTES
    finally:
        torch.distributed.destroy_process_group()
