"""Levers of a configuration."""

from tuner.candidate import Candidate
from tuner.models import get_model
from tuner.search.levers import SAVES, SPEEDS, levers
from tuner.search.planning.weighing import Blocked, permitted
from tuner.search.validity import ValidityChecker

DENSE, EXPERTS = get_model("llama3-8b"), get_model("deepseek-v3")


def test_a_lever_that_would_change_nothing_is_not_offered():
    plain = Candidate.from_flat({"micro_batch_size": 1})
    names = {lever.name for lever in levers(plain, DENSE)}
    assert "recompute core_attn" in names
    assert not names & {"half the micro-batch", "recompute nothing", "distributed optimizer"}
    for lever in levers(plain, DENSE):
        assert lever.applied(plain) != plain


def test_modules_are_added_to_those_recomputed_already_and_each_may_be_kept_instead():
    flat = {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp"]}
    found = {lever.name: lever for lever in levers(Candidate.from_flat(flat), DENSE)}
    added = found["recompute layernorm"].applied(Candidate.from_flat(flat))
    assert added.recompute_modules == ("core_attn", "layernorm", "mlp")
    kept = found["keep what mlp computed"]
    assert kept.aim == SPEEDS
    assert kept.applied(Candidate.from_flat(flat)).recompute_modules == ("core_attn",)


def test_an_fp8_recipe_without_fp8_that_costs_memory_may_be_another():
    aware = {"use_precision_aware_optimizer": True, "fp8_recipe": "tensorwise"}
    name = "main weights and gradients narrow, too"
    found = {lever.name: lever for lever in levers(Candidate.from_flat(aware), EXPERTS)}
    assert found[name].applied(Candidate.from_flat(aware)).to_flat()["fp8_recipe"] == "delayed"
    for flat in ({}, {**aware, "fp8": "hybrid"}):
        assert name not in {lever.name for lever in levers(Candidate.from_flat(flat), EXPERTS)}


def test_experts_have_levers_of_their_own():
    dense, experts = (
        {lever.name for lever in levers(Candidate.from_flat({}), model)}
        for model in (DENSE, EXPERTS)
    )
    assert {"recompute moe_act", "recompute mla_up_proj", "twice the expert parallelism"} <= experts
    assert not {"recompute moe_act", "twice the expert parallelism"} & dense


def test_a_pipeline_is_halved_with_the_same_chunks_and_one_stage_has_none():
    flat = {"pipeline_model_parallel_size": 4, "virtual_pipeline_model_parallel_size": 2}
    candidate = Candidate.from_flat(flat)
    found = {lever.name: lever for lever in levers(candidate, DENSE)}
    half = found["half the pipeline parallelism"].applied(candidate)
    assert (half.pipeline_model_parallel_size, half.virtual_pipeline_model_parallel_size) == (2, 4)
    two = Candidate.from_flat({**flat, "pipeline_model_parallel_size": 2})
    lever = next(x for x in levers(two, DENSE) if x.name == "half the pipeline parallelism")
    assert lever.applied(two).virtual_pipeline_model_parallel_size is None


def test_graphs_are_taken_away_to_save_memory_and_added_to_save_time():
    graphed = {"cuda_graph_impl": "full_iteration", "use_te_rng_tracker": True}
    without = next(
        x for x in levers(Candidate.from_flat(graphed), DENSE) if x.name == "no CUDA graphs"
    )
    assert without.aim == SAVES
    assert without.applied(Candidate.from_flat(graphed)) == Candidate.from_flat({})


def permitted_levers(flat, frontend):
    run = {"bf16": True, "params_dtype": "bf16", "seq_length": 4096, "global_batch_size": 128}
    checker = ValidityChecker({**DENSE.to_flat(), **run}, 16, "0.16.1", frontend)
    candidate = Candidate.from_flat({"use_distributed_optimizer": True, **flat})
    known = {violation.rule for violation in checker.errors(candidate)}
    return candidate, {
        lever.name: permitted(lever, candidate, checker, known)
        for lever in levers(candidate, DENSE)
    }


def test_a_lever_brings_the_switches_and_variables_that_rules_ask_for_beside_it():
    flat = {"pipeline_model_parallel_size": 2, "env": {"NVTE_FLASH_ATTN": "1"}}
    candidate, found = permitted_levers(flat, "megatron-lm")
    offloaded = found["offload core_attn"].applied(candidate)
    assert dict(offloaded.env) == {"NVTE_FLASH_ATTN": "1", "NVTE_CPU_OFFLOAD_V1": "1"}
    graphed = found["a CUDA graph of the step"].applied(candidate)
    assert dict(graphed.extra)["check_for_nan_in_loss"] is False
    assert not isinstance(found["optimizer moments in BF16"], Blocked)


def test_a_lever_is_blocked_where_only_another_layout_would_allow_it():
    _, found = permitted_levers({"pipeline_model_parallel_size": 2}, "mcore")
    assert found["offload 16 layers"].rule == "O02"
