"""Placement: ranks per node, and which nodes must share an NVLink domain."""

import pytest

from tuner.cluster.placement import place
from tuner.errors import InputError


def test_a_small_trial_takes_part_of_one_node():
    placement = place(2, nodes=4, gpus_per_node=8, device="cuda")
    assert placement.ranks == (2,)


def test_a_large_trial_takes_whole_different_nodes():
    placement = place(24, nodes=4, gpus_per_node=8, device="cuda")
    assert placement.ranks == (8, 8, 8)


@pytest.mark.parametrize("world_size", [12, 40])
def test_ranks_that_cannot_be_placed_are_refused(world_size):
    with pytest.raises(InputError):
        place(world_size, nodes=4, gpus_per_node=8, device="cuda")


@pytest.mark.parametrize(
    ("gpus", "domain", "tensor", "expert", "together"),
    [
        (8, 8, 8, 1, 1),
        (4, 72, 4, 1, 1),
        (4, 72, 8, 1, 2),  # tensor parallelism over two nodes of a rack
        (4, 72, 1, 32, 8),
        (8, 8, 4, 64, 1),  # experts that no domain holds may be anywhere
    ],
)
def test_groups_that_fit_a_domain_keep_their_nodes_in_one(gpus, domain, tensor, expert, together):
    placement = place(
        64,
        nodes=64 // gpus,
        gpus_per_node=gpus,
        device="cuda",
        domain_gpus=domain,
        tensor_parallel=tensor,
        expert_parallel=expert,
    )
    assert placement.nodes_in_domain == together


@pytest.mark.parametrize("tensor", [16, 3])
def test_tensor_parallelism_across_domains_is_refused(tensor):
    with pytest.raises(InputError, match="NVLink domain"):
        place(48, nodes=6, gpus_per_node=8, device="cuda", domain_gpus=8, tensor_parallel=tensor)
