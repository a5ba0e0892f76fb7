"""Each recompute setting keeps less of what it recomputes, and only of that."""

from __future__ import annotations

import itertools

import pytest
from tiny_models import HEADS, HIDDEN_BYTES, LAYERS, LENGTH, kept, run

from tuner.errors import InputError


def selective(model: str, *modules: str, **config: object):
    return run(model, recompute_granularity="selective", recompute_modules=modules, **config)


def full(model: str, method: str, layers: int, **config: object):
    return run(
        model,
        recompute_granularity="full",
        recompute_method=method,
        recompute_num_layers=layers,
        **config,
    )


@pytest.mark.parametrize(
    ("model", "module"),
    [
        ("dense", "mlp"),
        ("moe", "layernorm"),
        ("moe", "moe"),
        ("moe", "moe_act"),
        ("moe", "shared_experts"),
        ("latent", "layernorm"),
        ("latent", "mla_up_proj"),
        ("latent", "moe"),
    ],
)
def test_a_recomputed_module_keeps_less(model, module) -> None:
    assert kept(selective(model, module)) < kept(run(model))


@pytest.mark.parametrize(
    ("model", "module"),
    [("dense", "moe"), ("dense", "shared_experts"), ("dense", "layernorm"), ("moe", "mlp")],
)
def test_modules_that_a_layer_does_not_have_change_nothing(model, module) -> None:
    """Norms of dense layers are part of the products that follow them."""
    assert selective(model, module).peak_allocated_bytes == run(model).peak_allocated_bytes


def test_recomputed_attention_keeps_no_scores() -> None:
    scores = LAYERS * HEADS * LENGTH * LENGTH * 2
    with_scores = kept(run("dense", attention_backend="unfused"))
    without = kept(selective("dense", "core_attn", attention_backend="unfused"))
    assert with_scores - without > 0.9 * scores


@pytest.mark.parametrize("model", ["dense", "moe", "latent"])
def test_each_block_of_full_recompute_leaves_one_layer_less(model) -> None:
    bytes_kept = [kept(run(model))] + [kept(full(model, "block", n)) for n in range(1, LAYERS)]
    saved = [before - after for before, after in itertools.pairwise(bytes_kept)]
    assert len(set(saved)) == 1
    assert saved[0] > HIDDEN_BYTES


@pytest.mark.parametrize("model", ["dense", "moe", "latent"])
def test_larger_groups_of_uniform_recompute_keep_fewer_inputs(model) -> None:
    single, pairs = kept(full(model, "uniform", 1)), kept(full(model, "uniform", 2))
    assert single - pairs == pytest.approx(2 * HIDDEN_BYTES, rel=0.1)


def test_groups_that_do_not_fill_a_chunk_are_refused_by_name() -> None:
    with pytest.raises(InputError, match="recompute_num_layers"):
        full("dense", "uniform", 3)


def test_distributed_saved_activations_keep_a_part_of_each_input() -> None:
    pair = {"tensor_model_parallel_size": 2}
    whole = kept(full("dense", "uniform", 1, **pair))
    parts = kept(full("dense", "uniform", 1, distribute_saved_activations=True, **pair))
    assert whole - parts == pytest.approx(LAYERS * HIDDEN_BYTES / 2, rel=0.1)


def test_a_recomputed_mlp_with_bias_is_refused_by_name() -> None:
    with pytest.raises(InputError, match="add_bias_linear never ends"):
        selective("plain", "mlp")


def test_variables_around_the_process_do_not_steer_it(monkeypatch) -> None:
    monkeypatch.setenv("NVTE_FLASH_ATTN", "1")
    fresh = run("dense", attention_backend="unfused", te_version="2.7.0")
    assert kept(fresh) == kept(run("dense", attention_backend="unfused"))
