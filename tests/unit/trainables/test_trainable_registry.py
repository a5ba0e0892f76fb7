from pathlib import Path

import pytest

import trainables
from trainables.launch import run_trial
from tuner.measurement import TrialSpec

SPEC = TrialSpec(model={}, config={}, world_size=4, seq_length=1, global_batch_size=1)


def test_trainables_are_found_by_name() -> None:
    assert trainables.names() == ("megatron_core", "megatron_bridge", "command", "simulated")
    assert trainables.get("megatron_core").rank_module == "trainables.megatron_core"


def test_an_unknown_trainable_lists_the_known_ones() -> None:
    with pytest.raises(KeyError, match="'torchtitan' is unknown; choose one of megatron_core"):
        trainables.get("torchtitan")


def test_nodes_must_share_the_ranks_evenly(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="world_size=4 is not a multiple of nnodes=3"):
        run_trial(SPEC, tmp_path, nnodes=3, master_port=1)


def test_several_nodes_need_a_port_to_meet_at(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="master_port is needed"):
        run_trial(SPEC, tmp_path, nnodes=2)
