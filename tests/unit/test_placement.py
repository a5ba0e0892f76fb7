"""Placement: bundles follow the candidate's world size."""

import pytest

from tuner.cluster.placement import place
from tuner.errors import InputError


def test_a_small_trial_takes_part_of_one_node():
    placement = place(2, nodes=4, gpus_per_node=8, device="cuda")
    assert placement.bundles == [{"CPU": 2.0, "GPU": 2.0}]
    assert placement.strategy == "PACK"


def test_a_large_trial_takes_whole_different_nodes():
    placement = place(24, nodes=4, gpus_per_node=8, device="cuda")
    assert placement.ranks == (8, 8, 8)
    assert placement.strategy == "STRICT_SPREAD"


def test_cpu_ranks_reserve_no_gpu():
    assert place(4, nodes=1, gpus_per_node=4, device="cpu").bundles == [{"CPU": 4.0}]


@pytest.mark.parametrize("world_size", [12, 40])
def test_ranks_that_cannot_be_placed_are_refused(world_size):
    with pytest.raises(InputError):
        place(world_size, nodes=4, gpus_per_node=8, device="cuda")
