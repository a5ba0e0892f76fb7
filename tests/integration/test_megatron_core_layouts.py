"""Layouts, recompute settings and architectures of real Megatron-Core give the same losses.

All cases run in one job of four real processes (this file, run as a script); the tests read what it
wrote.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tuner.measurement import TrialSpec

pytestmark = pytest.mark.slow

WORLD_SIZE = 4
STEPS = 3

LLAMA: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_query_groups": 4,
    "ffn_hidden_size": 160,
    "gated_linear_unit": True,
    "activation_func": "silu",
    "add_bias_linear": False,
    "normalization": "RMSNorm",
    "vocab_size": 512,
    "max_position_embeddings": 64,
    "position_embedding_type": "rope",
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}
GPT3 = {
    **LLAMA,
    "num_query_groups": 8,
    "gated_linear_unit": False,
    "activation_func": "gelu",
    "add_bias_linear": True,
    "normalization": "LayerNorm",
    "position_embedding_type": "learned_absolute",
    "share_embeddings_and_output_weights": True,
}
NEMOTRON = {
    **GPT3,
    "activation_func": "squared_relu",
    "add_bias_linear": False,
    "layernorm_zero_centered_gamma": True,
    "share_embeddings_and_output_weights": False,
    "position_embedding_type": "rope",
    "rotary_percent": 0.5,
}
MIXTRAL = {
    **LLAMA,
    "num_moe_experts": 4,
    "moe_ffn_hidden_size": 96,
    "moe_router_topk": 2,
    "moe_shared_expert_intermediate_size": 64,
}
DEEPSEEK = {
    **MIXTRAL,
    "moe_layer_freq": [0, 1, 1, 1],
    "num_query_groups": 8,
    "multi_latent_attention": True,
    "qk_layernorm": True,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_head_dim": 16,
    "qk_pos_emb_head_dim": 8,
    "v_head_dim": 12,
    "mtp_num_layers": 1,
}
GPT_OSS = {
    **LLAMA,
    "num_moe_experts": 4,
    "moe_ffn_hidden_size": 64,
    "moe_router_topk": 2,
    "activation_func": "quick_gelu",
    "activation_func_clamp_value": 7.0,
    "glu_linear_offset": 1.0,
    "add_bias_linear": True,
    "softmax_type": "learnable",
    "window_size": [16, 0],
    "window_attn_skip_freq": 2,
    "add_qkv_bias": True,
    "qk_layernorm": True,
}


def layout(tensor: int = 1, pipeline: int = 1, virtual: int | None = None) -> dict[str, Any]:
    return {
        "tensor_model_parallel_size": tensor,
        "pipeline_model_parallel_size": pipeline,
        "virtual_pipeline_model_parallel_size": virtual,
        "sequence_parallel": tensor > 1,
        "use_distributed_optimizer": True,
    }


def selective(*modules: str) -> dict[str, Any]:
    return {"recompute_granularity": "selective", "recompute_modules": list(modules)}


def full(method: str, layers: int) -> dict[str, Any]:
    return {
        "recompute_granularity": "full",
        "recompute_method": method,
        "recompute_num_layers": layers,
    }


TP2_PP2 = layout(2, 2)
CASES: dict[str, dict[str, Any]] = {
    # name: model, config, precision
    "llama": {"config": layout()},
    "llama dp no distributed optimizer": {
        "config": {**layout(), "use_distributed_optimizer": False}
    },
    "llama tp2": {"config": layout(2)},
    "llama tp2 micro-batch 2": {"config": {**layout(2), "micro_batch_size": 2}},
    "llama tp4": {"config": layout(4)},
    "llama tp2 no sequence parallel": {"config": {**layout(2), "sequence_parallel": False}},
    "llama pp2": {"config": layout(1, 2)},
    "llama pp4": {"config": layout(1, 4)},
    "llama pp2 vpp2": {"config": layout(1, 2, 2)},
    "llama tp2 pp2": {"config": TP2_PP2},
    "llama tp2 pp2 vpp2": {"config": layout(2, 2, 2)},
    "llama uneven pp2": {
        "config": {**layout(1, 2), "num_layers_in_first_pipeline_stage": 1},
    },
    "llama overlapped": {
        "config": {**layout(), "overlap_grad_reduce": True, "overlap_param_gather": True},
    },
    "llama tp2 pp2 full uniform 1": {"config": TP2_PP2 | full("uniform", 1)},
    "llama tp2 pp2 full uniform 2": {"config": TP2_PP2 | full("uniform", 2)},
    "llama tp2 pp2 full block 1": {"config": TP2_PP2 | full("block", 1)},
    "llama tp2 pp2 core_attn": {"config": TP2_PP2 | selective("core_attn")},
    "llama tp2 pp2 mlp": {"config": TP2_PP2 | selective("mlp")},
    "llama tp2 pp2 layernorm": {"config": TP2_PP2 | selective("layernorm")},
    "llama tp2 pp2 all modules": {
        "config": TP2_PP2 | selective("core_attn", "layernorm", "mlp"),
    },
    "llama tp2 pp2 nothing recomputed": {"config": TP2_PP2 | selective()},
    "llama tp2 pp2 distributed saved": {
        "config": TP2_PP2
        | full("uniform", 1)
        | {"distribute_saved_activations": True, "sequence_parallel": False},
    },
    "llama bf16": {"config": layout(), "precision": "bf16"},
    "llama bf16 tp2 pp2 vpp2": {"config": layout(2, 2, 2), "precision": "bf16"},
    "llama bf16 tp2 pp2": {"config": TP2_PP2, "precision": "bf16"},
    "llama bf16 tp2 pp2 full": {"config": TP2_PP2 | full("uniform", 1), "precision": "bf16"},
    "gpt3": {"model": GPT3, "config": layout()},
    "gpt3 tp2 pp2 vpp2": {"model": GPT3, "config": layout(2, 2, 2)},
    "nemotron": {"model": NEMOTRON, "config": layout()},
    "nemotron tp2 pp2": {"model": NEMOTRON, "config": TP2_PP2},
    "mixtral": {"model": MIXTRAL, "config": layout()},
    "mixtral ep2": {"model": MIXTRAL, "config": {**layout(), "expert_model_parallel_size": 2}},
    "mixtral ep4": {"model": MIXTRAL, "config": {**layout(), "expert_model_parallel_size": 4}},
    "mixtral tp2 etp2 ep2": {
        "model": MIXTRAL,
        "config": {**layout(2), "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 2},
    },
    "mixtral tp2 etp1 ep4": {
        "model": MIXTRAL,
        "config": {**layout(2), "expert_model_parallel_size": 4, "expert_tensor_parallel_size": 1},
    },
    "mixtral ep2 recomputed": {
        "model": MIXTRAL,
        "config": {**layout(), "expert_model_parallel_size": 2} | selective("moe"),
    },
    "mixtral ep2 shared experts recomputed": {
        "model": MIXTRAL,
        "config": {**layout(), "expert_model_parallel_size": 2} | selective("shared_experts"),
    },
    "deepseek": {"model": DEEPSEEK, "config": layout()},
    "deepseek tp2 pp2 ep2": {
        "model": DEEPSEEK,
        "config": {**TP2_PP2, "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1},
    },
    "deepseek mla_up_proj recomputed": {
        "model": DEEPSEEK,
        "config": layout() | selective("mla_up_proj"),
    },
    "gpt-oss": {"model": GPT_OSS, "config": layout()},
    "gpt-oss tp2 pp2 ep2": {
        "model": GPT_OSS,
        "config": {**TP2_PP2, "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1},
    },
}


def case_spec(case: dict[str, Any]) -> TrialSpec:
    return TrialSpec(
        model=case.get("model", LLAMA),
        config=case["config"],
        world_size=WORLD_SIZE,
        seq_length=64,
        global_batch_size=4,
        precision=case.get("precision", "fp32"),
    )


def run_cases(output: Path) -> None:
    """Run every case in this process, one of four ranks; rank 0 writes losses and peaks."""
    import torch

    from trainables.megatron_core.cpu_device import cpu_device, without_compilation

    torch.set_num_threads(1)
    with without_compilation():
        import megatron.core.models.gpt
        import megatron.core.optimizer  # noqa: F401
    store, rank, world_size = next(torch.distributed.rendezvous("env://"))
    results = {}
    for name, case in CASES.items():
        # Groups have threads of their own, so each case ends with all of them destroyed.
        own_keys = torch.distributed.PrefixStore(name, store)
        torch.distributed.init_process_group(
            "gloo", store=own_keys, rank=rank, world_size=world_size
        )
        with cpu_device():
            results[name] = run_case(case_spec(case))
        torch.distributed.destroy_process_group()
    if rank == 0:
        output.write_text(json.dumps(results))


def run_case(spec: TrialSpec) -> dict[str, Any]:
    import torch
    from megatron.core import parallel_state

    from trainables.megatron_core.memory import StorageTracker
    from trainables.megatron_core.model import build_training_state
    from trainables.megatron_core.plan import build_plan
    from trainables.megatron_core.processes import initialize_parallel_state
    from trainables.megatron_core.report import global_losses
    from trainables.megatron_core.schedule import TrainingStep

    plan = build_plan(spec, use_transformer_engine=False)
    initialize_parallel_state(plan, timeout_s=60)
    tracker = StorageTracker()
    with tracker.tracking():
        state = build_training_state(plan)
        tracker.reset_peak()
        step = TrainingStep(plan, state)
        losses = global_losses(spec, plan, [step(index) for index in range(STEPS)])
    peak = torch.tensor(tracker.peak_bytes)
    torch.distributed.all_reduce(peak, op=torch.distributed.ReduceOp.MAX)
    parallel_state.destroy_model_parallel()
    return {"losses": losses, "peak_bytes": int(peak)}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    output = tmp_path_factory.mktemp("layouts") / "results.json"
    root = Path(__file__).resolve().parents[2]
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--nproc-per-node", str(WORLD_SIZE), __file__, str(output)),
    ]
    environment = {
        **os.environ,
        "PYTHONPATH": str(root),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONWARNINGS": "ignore",
    }
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=550)
    assert done.returncode == 0, done.stderr[-3000:]
    loaded: dict[str, dict[str, Any]] = json.loads(output.read_text())
    return loaded


def reference_of(name: str) -> str:
    """The first case with the same model and precision."""
    spec = case_spec(CASES[name])
    return next(
        other
        for other, case in CASES.items()
        if (case_spec(case).model, case_spec(case).precision) == (spec.model, spec.precision)
    )


@pytest.mark.parametrize("name", CASES)
def test_every_layout_computes_the_losses_of_the_reference_layout(
    results: dict[str, dict[str, Any]], name: str
) -> None:
    tolerance = 1e-5 if case_spec(CASES[name]).precision == "fp32" else 5e-4
    expected = results[reference_of(name)]["losses"]
    assert results[name]["losses"] == pytest.approx(expected, abs=tolerance)


@pytest.mark.parametrize("name", CASES)
def test_losses_fall_on_the_mock_data(results: dict[str, dict[str, Any]], name: str) -> None:
    losses = results[name]["losses"]
    assert len(losses) == STEPS
    assert losses[-1] < losses[0] - 0.05


RECOMPUTED = {
    "llama tp2 pp2 full uniform 1": "llama tp2 pp2",
    "llama tp2 pp2 full uniform 2": "llama tp2 pp2",
    "llama tp2 pp2 full block 1": "llama tp2 pp2",
    "llama tp2 pp2 core_attn": "llama tp2 pp2",
    "llama tp2 pp2 mlp": "llama tp2 pp2",
    "llama tp2 pp2 layernorm": "llama tp2 pp2",
    "llama tp2 pp2 all modules": "llama tp2 pp2",
    "llama bf16 tp2 pp2 full": "llama bf16 tp2 pp2",
    "mixtral ep2 recomputed": "mixtral ep2",
    "mixtral ep2 shared experts recomputed": "mixtral ep2",
    "deepseek mla_up_proj recomputed": "deepseek",
}


@pytest.mark.parametrize(("name", "plain"), RECOMPUTED.items())
def test_recompute_leaves_the_losses_exactly_as_they_are(
    results: dict[str, dict[str, Any]], name: str, plain: str
) -> None:
    assert results[name]["losses"] == results[plain]["losses"]


@pytest.mark.parametrize(("name", "plain"), RECOMPUTED.items())
def test_recompute_never_raises_the_peak(
    results: dict[str, dict[str, Any]], name: str, plain: str
) -> None:
    assert results[name]["peak_bytes"] <= results[plain]["peak_bytes"]


@pytest.mark.parametrize(
    ("smaller", "larger"),
    [
        ("llama tp2 pp2 full uniform 1", "llama tp2 pp2"),
        ("llama tp2 pp2 mlp", "llama tp2 pp2"),
        ("llama tp2 pp2 layernorm", "llama tp2 pp2"),
        ("llama", "llama dp no distributed optimizer"),
        ("llama tp2", "llama tp2 micro-batch 2"),
        ("llama pp2", "llama pp2 vpp2"),
        ("llama pp2", "llama"),
        ("llama bf16", "llama"),
        ("mixtral ep4", "mixtral ep2"),
        ("mixtral ep2 recomputed", "mixtral ep2"),
    ],
)
def test_peaks_are_ordered_as_the_settings_promise(
    results: dict[str, dict[str, Any]], smaller: str, larger: str
) -> None:
    assert results[smaller]["peak_bytes"] < results[larger]["peak_bytes"]


def test_selective_recompute_of_nothing_is_no_recompute(
    results: dict[str, dict[str, Any]],
) -> None:
    assert results["llama tp2 pp2 nothing recomputed"] == results["llama tp2 pp2"]


if __name__ == "__main__":
    run_cases(Path(sys.argv[1]))
