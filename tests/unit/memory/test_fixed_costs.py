"""Fixed costs: which communicators a candidate opens and what they hold."""

from __future__ import annotations

from importlib import resources

import pytest
import yaml

from tuner.candidate import Candidate
from tuner.hardware import get_gpu
from tuner.memory.fixed_costs import communicators, fixed_costs

MIB = 1 << 20
GB = 10**9


def candidate(**fields) -> Candidate:
    return Candidate.from_flat(fields)


def groups(fields: dict, **options) -> dict[str, tuple[int, int, int]]:
    opened = communicators(candidate(**fields), link_domain=8, **options)
    return {c.group: (c.ranks, c.peers_in_domain, c.peers_over_network) for c in opened}


def test_a_single_rank_opens_no_communicator():
    assert groups({}, world_size=1) == {}


def test_pipeline_neighbours_on_other_nodes_are_reached_over_the_network():
    found = groups(
        {
            "tensor_model_parallel_size": 4,
            "pipeline_model_parallel_size": 4,
            "virtual_pipeline_model_parallel_size": 5,
        },
        world_size=32,
    )
    assert found == {
        "world": (32, 0, 0),
        "tensor": (4, 0, 0),
        "data": (2, 0, 0),
        "pipeline": (4, 0, 2),
    }


def test_pipeline_neighbours_on_one_node_are_reached_over_nvlink():
    fields = {"pipeline_model_parallel_size": 2}
    assert groups(fields, world_size=4)["pipeline"] == (2, 1, 0)


def test_expert_groups_exist_for_mixtures_of_experts_only():
    fields = {"expert_model_parallel_size": 8}
    assert groups(fields, world_size=16, moe=True)["expert"] == (8, 7, 0)
    assert "expert" not in groups({}, world_size=16)


def test_all_to_all_among_eight_h100_holds_what_was_measured():
    # NCCL issue 1685: device memory grew from 1.06 to 4.34 GB at the first all-to-all.
    costs = fixed_costs(
        candidate(expert_model_parallel_size=8), gpu=get_gpu("h100"), world_size=8, moe=True
    )
    held = next(item.bytes for item in costs.items if item.name.startswith("NCCL expert (8"))
    assert held == pytest.approx(3.28 * GB, rel=0.01)


def test_collectives_on_a100_hold_what_was_measured():
    # NCCL issue 964: 544 MB for two GPUs, 688 MB for more.
    costs = fixed_costs(candidate(tensor_model_parallel_size=2), gpu=get_gpu("a100"), world_size=8)
    held = {item.name: item.bytes for item in costs.items}
    assert held["NCCL tensor (2 ranks)"] == 544 * MIB
    assert held["NCCL data (4 ranks)"] == 688 * MIB


def test_userbuffers_repeat_the_hidden_states_when_communication_is_overlapped():
    fields = {"tensor_model_parallel_size": 8, "tp_comm_overlap": True}
    costs = fixed_costs(
        candidate(**fields), gpu=get_gpu("h100"), world_size=8, hidden_bytes=64 * MIB
    )
    held = {item.name: item.bytes for item in costs.items}
    assert held["userbuffers"] == 640 * MIB


def test_the_total_is_the_sum_of_the_items():
    costs = fixed_costs(candidate(), gpu=get_gpu("gb200"), world_size=72)
    assert costs.total_bytes == sum(item.bytes for item in costs.items)
    assert {item.name for item in costs.items} == {
        "CUDA context",
        "NCCL world (72 ranks)",
        "NCCL data (72 ranks)",
    }


def test_every_figure_stands_beside_its_source():
    text = (resources.files("tuner.memory") / "fixed_costs.yaml").read_text(encoding="utf-8")

    def check(node: dict) -> int:
        if "source" in node:
            assert isinstance(node.get("value", node.get("mib")), (int, float))
            return 1
        return sum(check(child) for child in node.values())

    assert check(yaml.safe_load(text)) >= 10


def test_a_world_smaller_than_a_replica_has_groups_all_the_same():
    sizes = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}
    assert groups(sizes, world_size=2)["pipeline"] == (2, 1, 0)
