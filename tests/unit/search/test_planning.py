"""A planned space against the estimates of each of its candidates."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from workplaces import h100_node

from tuner.candidate import Candidate
from tuner.cluster.prepared import prepare
from tuner.job import find_job, load_job
from tuner.models import ModelSpec
from tuner.search.enumeration import enumerate_space
from tuner.search.planning.estimator import SpaceEstimator
from tuner.search.planning.plan import plan_space, without_effects
from tuner.search.planning.prior import ComposedEstimator
from tuner.search.planning.whole import BEYOND_BYTES, WholeSpace
from tuner.search.requirements import Requirements
from tuner.search.space import parse_space
from tuner.search.validity import ValidityChecker
from tuner.timing.estimate import TimeRun

MODEL = {
    "num_layers": 4,
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "ffn_hidden_size": 512,
    "gated_linear_unit": True,
    "normalization": "RMSNorm",
    "add_bias_linear": False,
    "vocab_size": 1024,
    "position_embedding_type": "rope",
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}
AXES = {
    "pipeline_model_parallel_size": [1, 2, 4],
    "recompute_granularity": [None, "full"],
    "recompute_method": {"values": ["block"], "when": {"recompute_granularity": "full"}},
    "recompute_num_layers": {"values": [1], "when": {"recompute_granularity": "full"}},
    "cuda_graph_impl": ["none", "full_iteration"],
    "use_te_rng_tracker": {"values": [True], "when": {"cuda_graph_impl": "full_iteration"}},
    "cpu_offloading": [False, True],
    "cpu_offloading_num_layers": {"values": [3], "when": {"cpu_offloading": True}},
    "optimizer_cpu_offload": [False, True],
    "optimizer_offload_fraction": {"values": [0.5, 1.0], "when": {"optimizer_cpu_offload": True}},
    "use_precision_aware_optimizer": {"values": [True], "when": {"optimizer_cpu_offload": True}},
    "env.PYTORCH_CUDA_ALLOC_CONF": [None, "expandable_segments:True"],
    "env.NCCL_GRAPH_REGISTER": {
        "values": ["0"],
        "when": {"env.PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
    },
}


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("profiles")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEGATRON_TUNER_CACHE", str(folder))
        yield folder


def test_a_plan_counts_and_ranks_what_estimates_of_each_candidate_say() -> None:
    space = parse_space({"axes": AXES}, where="here")
    run = {"bf16": True, "params_dtype": "bf16", "pipeline_dtype": "bf16"}
    checker = ValidityChecker(
        {**MODEL, **run, "seq_length": 512, "global_batch_size": 32}, world_size=4, mcore="0.16.1"
    )
    place = h100_node(MODEL, gpus=4, length=512, batch=32)
    required = Requirements(
        forbid={"optimizer_offload_fraction": [1.0], "pipeline_model_parallel_size": [4]}
    )
    estimator = SpaceEstimator(place, workers=1)
    whole = enumerate_space(space, checker)
    met = whole.take(np.flatnonzero(required.met(whole, 4)))
    estimator.measure(estimator.needed(whole))
    memory = estimator.estimate(met).memory_bytes
    estimator.place = replace(place, limit_bytes=float(np.median(memory)))
    best, beyond, counts = WholeSpace(space, checker, required).best(
        estimator, 10, lambda stage, done, total: None
    )

    found = estimator.estimate(met, beyond_bytes=BEYOND_BYTES)
    timed = np.isfinite(found.step_time_s)
    fits = found.fits & timed
    assert (counts.valid, counts.not_required) == (len(whole), len(whole) - len(met))
    assert 0 < counts.feasible == fits.sum()
    assert 0 < counts.oom == len(met) - fits.sum() - counts.not_estimated
    assert best[0].step_time_s == pytest.approx(found.step_time_s[fits].min())
    assert min(one.memory_bytes for one in best) == pytest.approx(found.memory_bytes[fits].min())
    assert beyond is not None
    assert beyond.step_time_s == pytest.approx(found.step_time_s[~found.fits & timed].min())
    rows = {met.candidate(row): row for row in range(len(met))}
    for one in best:
        row = rows[one.candidate]
        assert one.step_time_s == pytest.approx(found.step_time_s[row])
        assert one.memory_bytes == pytest.approx(found.memory_bytes[row])
        assert sum(one.memory_parts.values()) == pytest.approx(one.memory_bytes)


def test_a_profile_of_memory_holds_the_kernels_that_a_run_for_kernels_gives() -> None:
    from tuner.memory.composition import ProfileSource
    from tuner.memory.composition.measure import measure_profile, profile_task
    from tuner.timing.profile_runs import runs_alike
    from tuner.timing.units import kernel_request, model_kernels, read_kernels

    experts = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_layer_freq": [0, 1, 1, 1]}
    model = ModelSpec.from_flat({**MODEL, **experts})
    setting = Candidate.from_flat(
        {
            "use_distributed_optimizer": True,
            "expert_model_parallel_size": 2,
            "moe_token_dispatcher_type": "alltoall",
            "recompute_granularity": "selective",
            "recompute_modules": ["core_attn"],
        }
    )
    run = {"seq_length": 512, "precision": "bf16"}
    task = profile_task(model, setting, ProfileSource(512))
    assert runs_alike(kernel_request(model, setting, **run), task.request)
    seen = []
    measure_profile(task, lambda *told: seen.append(told))
    _, trace, stated = seen[0]
    found = read_kernels(trace, task.request, json.loads(stated["parameters"]))
    expected = model_kernels(model, setting, **run)
    assert set(found.units) == set(expected.units) == {"embedding", "dense", "experts", "head"}
    for name, unit in expected.units.items():
        for side in ("forward", "backward"):
            one, other = getattr(found.units[name], side), getattr(unit, side)
            for column in ("kind", "m", "n", "k", "batch", "flops", "bytes", "op", "group_size"):
                assert np.array_equal(getattr(one, column), getattr(other, column))
    assert found.optimizer_bytes_per_parameter == pytest.approx(
        expected.optimizer_bytes_per_parameter, rel=1e-3
    )
    other = profile_task(model, replace(setting, micro_batch_size=2), ProfileSource(512))
    assert not runs_alike(kernel_request(model, setting, **run), other.request)


@pytest.mark.parametrize("name", ["llama3_70b_h100", "deepseek_v3_h100"])
def test_settings_of_shipped_jobs_are_enumerated_without_what_offload_adds(name: str) -> None:
    path = find_job(Path(name))
    prepared = prepare(load_job(path), where=name, base_folder=path.parent)
    found = without_effects(prepared.space, prepared.checker)
    assert len(found) > 1_000
    assert "use_precision_aware_optimizer" not in found.codes
    assert "optimizer_cpu_offload" not in found.codes
    assert len(found.values["offload_modules"]) > 1


def test_an_axis_that_depends_on_offload_is_enumerated_set_and_unset() -> None:
    moments = {"values": ["bf16"], "when": {"optimizer_cpu_offload": True}}
    aware = AXES["use_precision_aware_optimizer"]
    axes = {k: v for k, v in AXES.items() if k != "use_precision_aware_optimizer"}
    space = parse_space(
        {"axes": {**axes, "use_precision_aware_optimizer": aware, "exp_avg_dtype": moments}},
        where="here",
    )
    run = {"bf16": True, "params_dtype": "bf16", "pipeline_dtype": "bf16"}
    run |= {"seq_length": 512, "global_batch_size": 32, "use_distributed_optimizer": True}
    checker = ValidityChecker({**MODEL, **run}, world_size=4, mcore="0.16.1")
    found = without_effects(space, checker)
    for field, value in (("use_precision_aware_optimizer", True), ("exp_avg_dtype", "bf16")):
        assert {found.flat(row).get(field) for row in range(len(found))} == {None, value}


def test_estimates_do_not_depend_on_what_else_is_estimated() -> None:
    place = h100_node(MODEL, gpus=4, length=512, batch=32)
    full = {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    }
    host = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.0}
    aware = host | {"use_precision_aware_optimizer": True}
    modules = {"fine_grained_activation_offloading": True, "offload_modules": ["core_attn"]}
    candidates = [
        Candidate.from_flat({"use_distributed_optimizer": True, **changes})
        for changes in ({}, host, aware, full, full | aware, full | aware | modules)
    ]
    together = ComposedEstimator(place, workers=1)(candidates)
    for number, one in enumerate(candidates):
        alone = ComposedEstimator(place, workers=1)([one])
        assert alone.step_time_s[0] == pytest.approx(together.step_time_s[number], rel=1e-3)
        assert sum(alone.time_parts.values())[0] == pytest.approx(alone.step_time_s[0])
    timed = TimeRun.of(
        place.model, world_size=4, seq_length=512, global_batch_size=32, gpu="h100"
    ).times(candidates, place.rates)
    np.testing.assert_allclose(together.step_time_s, timed.step_s, rtol=0.02)
    assert together.memory_bytes[5] == together.memory_bytes[4]  # nothing is kept to be offloaded


def test_a_space_is_planned_where_only_offload_of_the_optimizer_is_wanted() -> None:
    """All candidates left have fields that the space adds the effect of."""
    fixed = {"use_distributed_optimizer": True}
    space = parse_space({"axes": AXES, "fixed": fixed}, where="here")
    run = {"bf16": True, "params_dtype": "bf16", "pipeline_dtype": "bf16"}
    checker = ValidityChecker(
        {**MODEL, **run, "seq_length": 512, "global_batch_size": 32}, world_size=4, mcore="0.16.1"
    )
    place = h100_node(MODEL, gpus=4, length=512, batch=32)
    wanted = Requirements(forbid={"optimizer_cpu_offload": [False]})
    found = plan_space(space, checker, place, wanted, workers=1)
    assert found.best
    assert all(one.candidate.optimizer_cpu_offload for one in found.best)
