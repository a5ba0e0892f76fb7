"""Jobs made from what people have: a model's config.json, a launch script, a job file."""

import json
from pathlib import Path

import pytest

from tuner.commands.starting import Run, starting_job
from tuner.errors import InputError

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "vocab_size": 128256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}
SCRIPT = (
    "torchrun --nproc-per-node 8 --nnodes 2 pretrain_gpt.py --num-layers 32 --hidden-size 4096 "
    "--ffn-hidden-size 14336 --num-attention-heads 32 --seq-length 4096 "
    "--max-position-embeddings 4096 --micro-batch-size 2 --global-batch-size 64 --bf16 "
    "--tensor-model-parallel-size 4 --sequence-parallel --overlap-grad-reduce "
    "--use-distributed-optimizer\n"
)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    return path


def test_a_model_needs_a_machine_and_gets_a_batch_of_some_million_tokens(config: Path):
    job = starting_job(config, Run(gpu="h100", gpus=64)).job
    assert (job.cluster.world_size, job.cluster.gpus_per_node) == (64, 8)
    assert job.workload.seq_length * job.workload.global_batch_size == 2**22
    assert job.space.includes == ["dense"]
    own = starting_job(config, Run("h100", 64, seq_length=4096, global_batch_size=96)).job
    assert (own.workload.seq_length, own.workload.global_batch_size) == (4096, 96)
    with pytest.raises(InputError, match="--gpu"):
        starting_job(config, Run(gpus=64))


def test_a_launch_script_gives_its_configuration_and_fixes_what_is_not_searched(tmp_path: Path):
    path = tmp_path / "launch.sh"
    path.write_text(SCRIPT)
    start = starting_job(path, Run(gpu="h100"))
    assert start.candidate is not None
    assert start.candidate.tensor_model_parallel_size == 4
    assert start.candidate.micro_batch_size == 2
    assert (start.job.cluster.world_size, start.job.workload.global_batch_size) == (16, 64)
    assert start.job.space.fixed["overlap_grad_reduce"] is True
    assert "tensor_model_parallel_size" not in start.job.space.fixed
    assert "overlap_p2p_comm" not in start.job.space.fixed


def test_a_job_file_stays_what_it_is(tmp_path: Path):
    shipped = starting_job(Path("llama3_70b_h100"), Run())
    assert not shipped.made
    assert shipped.job.cluster.world_size == 1024
    broken = tmp_path / "job.yaml"
    broken.write_text("name: x\ncluster: {gpus_per_node: 8, gpu: h100, nodez: 1}\n")
    with pytest.raises(InputError, match="nodez"):
        starting_job(broken, Run())
