"""What leaves the device: activations by module and by layer, and the optimizer's state."""

from __future__ import annotations

import pytest
from tiny_models import kept, run

from tuner.errors import InputError
from tuner.memory import DryRun
from tuner.memory.categories import OPTIMIZER_STATE

_MODULES = (
    "attn_norm",
    "qkv_linear",
    "core_attn",
    "attn_proj",
    "mlp_norm",
    "expert_fc1",
    "moe_act",
)


def by_module(model: str, *modules: str, **config: object) -> DryRun:
    return run(
        model,
        fine_grained_activation_offloading=True,
        offload_modules=modules,
        min_offloaded_tensor_size=1024,
        **config,
    )


def by_layer(model: str, layers: int, **config: object) -> DryRun:
    return run(model, cpu_offloading=True, cpu_offloading_num_layers=layers, **config)


@pytest.mark.parametrize(
    ("model", "module"),
    [
        ("dense", "qkv_linear"),
        ("dense", "core_attn"),
        ("moe", "mlp_norm"),
        ("moe", "expert_fc1"),
        ("moe", "moe_act"),
        ("latent", "attn_norm"),
        ("latent", "core_attn"),
    ],
)
def test_an_offloaded_module_keeps_less_on_the_device(model, module) -> None:
    assert kept(by_module(model, module)) < kept(run(model))


@pytest.mark.parametrize("model", ["moe", "latent"])
def test_all_modules_offload_together_over_a_pipeline(model) -> None:
    layout = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}
    assert kept(by_module(model, *_MODULES, **layout)) < kept(run(model, **layout)) / 2


@pytest.mark.parametrize("te_version", ["2.9.0", "2.11.0"])
@pytest.mark.parametrize("model", ["dense", "moe"])
def test_each_offloaded_layer_takes_its_activations_along(model, te_version) -> None:
    held = [kept(by_layer(model, n, te_version=te_version)) for n in (1, 2, 3)]
    first, second = held[0] - held[1], held[1] - held[2]
    assert first == second
    assert kept(run(model, te_version=te_version)) - held[0] == pytest.approx(first, rel=0.1)


def test_later_versions_offload_what_experts_keep_too() -> None:
    saved = [
        kept(run("moe", te_version=v)) - kept(by_layer("moe", 2, te_version=v))
        for v in ("2.9.0", "2.11.0")
    ]
    assert saved[1] > 1.5 * saved[0]


def test_double_buffers_stay_for_good() -> None:
    single, double = (
        by_layer("dense", 2, cpu_offloading_double_buffering=on) for on in (False, True)
    )
    layer = kept(by_layer("dense", 1)) - kept(by_layer("dense", 2))
    assert double.static_bytes - single.static_bytes == pytest.approx(2 * layer, rel=0.1)


def test_weights_do_not_leave() -> None:
    both = by_layer("dense", 2, cpu_offloading_weights=True)
    assert both.peak_allocated_bytes == by_layer("dense", 2).peak_allocated_bytes
    with pytest.raises(InputError, match="cpu_offloading_activations"):
        by_layer("dense", 2, cpu_offloading_weights=True, cpu_offloading_activations=False)


def optimizer_bytes(model: str, **config: object) -> int:
    found = run(model, use_distributed_optimizer=True, **config)
    return found.breakdown.get(OPTIMIZER_STATE, 0)


@pytest.mark.parametrize("model", ["dense", "moe"])
def test_the_offloaded_fraction_of_the_optimizer_leaves(model) -> None:
    half, whole = (
        optimizer_bytes(
            model,
            optimizer_cpu_offload=True,
            optimizer_offload_fraction=fraction,
            use_precision_aware_optimizer=True,
        )
        for fraction in (0.5, 1.0)
    )
    everything = optimizer_bytes(model)
    assert whole < 0.02 * everything
    assert half == pytest.approx(everything / 2, rel=0.1)


def test_main_parameters_stay_without_a_precision_aware_optimizer() -> None:
    """Adam's two moments leave; the float32 parameters, a third of the state, do not."""
    moments_away = optimizer_bytes(
        "dense", optimizer_cpu_offload=True, optimizer_offload_fraction=1.0
    )
    assert moments_away == pytest.approx(optimizer_bytes("dense") / 3, rel=0.05)
