"""Recipes of the real Megatron Bridge, oldest and newest release, made into trials on CPU.

Everything up to the training loop is the real package: recipe, override parser, validation,
callback manager and FLOP count. The loop itself needs a GPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from constraint_oracle import wheels
from constraint_oracle.client import SOURCES
from export_oracle.client import override_packages

from tuner.measurement import TrialSpec
from tuner.models.flops import model_flops_per_step
from tuner.models.spec import ModelSpec

pytestmark = pytest.mark.slow

MODEL = {
    "num_layers": 16,
    "hidden_size": 2048,
    "ffn_hidden_size": 8192,
    "num_attention_heads": 32,
    "num_query_groups": 8,
}
CANDIDATE = {
    "tensor_model_parallel_size": 2,
    "sequence_parallel": True,
    "micro_batch_size": 1,
    "recompute_granularity": "selective",
    "recompute_modules": ["core_attn"],
    "cuda_graph_impl": "none",
    "overlap_grad_reduce": True,
}
FIELDS = {
    "model.tensor_model_parallel_size": 2,
    "model.sequence_parallel": True,
    "model.recompute_modules": ["core_attn"],
    "model.seq_length": 4096,
    "train.global_batch_size": 16,
    "train.micro_batch_size": 1,
    "train.train_iters": 5,
    "ddp.overlap_grad_reduce": True,
    "checkpoint.save": None,
    "checkpoint.load": None,
    "logger.log_interval": 1,
    "logger.tensorboard_dir": None,
    "scheduler.lr_warmup_iters": 0,
    "optimizer.lr": 0.001,
}
LIBRARY_RECIPE = "llama32_1b_pretrain_config"
BENCHMARK_RECIPE = "llama3_8b_pretrain_8gpu_h100_bf16_config"


def a_question(recipe: str, model: dict[str, Any] = MODEL, **config: Any) -> dict[str, Any]:
    spec = TrialSpec(
        model=model,
        config={**CANDIDATE, **config},
        world_size=8,
        seq_length=4096,
        global_batch_size=16,
        warmup_steps=1,
        measure_steps=3,
        options={"recipe": recipe, "overrides": ["optimizer.lr=0.001"]},
    )
    return {"spec": spec.to_json(), "world_size": 8, "fields": list(FIELDS)}


def ask(mcore: str, questions: list[dict[str, Any]]) -> list[dict[str, Any]]:
    try:
        path = [
            wheels.unpacked("megatron-core", mcore),
            wheels.unpacked("megatron-bridge", wheels.BRIDGE_OF_MCORE[mcore]),
            override_packages(),
        ]
    except wheels.WheelUnavailableError as error:
        pytest.skip(str(error))
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-m", "bridge_trial_oracle.worker"],
        input="".join(json.dumps(question) + "\n" for question in questions),
        capture_output=True,
        text=True,
        timeout=400,
        env=os.environ
        | {
            "PYTHONPATH": os.pathsep.join(map(str, (*path, SOURCES, root))),
            "OMP_NUM_THREADS": "1",
        },
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("mcore", [wheels.MCORE_VERSIONS[0], wheels.MCORE_VERSIONS[-1]])
def test_a_recipe_becomes_the_candidate_and_is_measured(mcore: str) -> None:
    newest = mcore == wheels.MCORE_VERSIONS[-1]
    graphs = {"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": ["attn"]}
    graphs["recompute_granularity"] = None
    questions = [
        a_question(LIBRARY_RECIPE),
        a_question(LIBRARY_RECIPE, use_te_rng_tracker=True, **graphs),
        a_question(LIBRARY_RECIPE, {**MODEL, "num_layers": 32}),
        a_question("megatron.bridge.recipes.llama:llama32_1b_pretrian_config"),
    ]
    if newest:
        questions.append(a_question(BENCHMARK_RECIPE))
    plain, graphed, other_model, misspelt, *benchmark = ask(mcore, questions)

    assert "error" not in plain, plain
    assert plain["held"] == FIELDS
    assert (plain["warmup"], plain["steps"], plain["measured"]) == (2, 5, 3)
    assert plain["ended"]
    assert plain["losses"] == [2.0] * 5
    assert plain["synchronisations"] == 10
    held = {"position_embedding_type": "rope", "gated_linear_unit": False, "vocab_size": 128256}
    own = ModelSpec.from_flat({**MODEL, "kv_channels": 64, **held})
    expected = model_flops_per_step(own, 4096, 16, tensor_model_parallel_size=2)
    assert plain["flops"] == pytest.approx(expected, rel=1e-2)

    assert "error" not in graphed, graphed
    assert graphed["warmup"] == 5  # three eager steps, the capture, and the first replay
    assert "the recipe has num_layers=16, the job's model 32" in other_model["error"]
    assert "did you mean 'llama32_1b_pretrain_config'?" in misspelt["error"]
    for answer in benchmark:
        assert "error" not in answer, answer
        assert answer["environment"]["TORCH_NCCL_HIGH_PRIORITY"] == "1"
        assert answer["held"]["model.tensor_model_parallel_size"] == 2
