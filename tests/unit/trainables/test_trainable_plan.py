from dataclasses import replace
from typing import Any

import pytest

from trainables.errors import TrialSpecError
from tuner.measurement import TrialSpec

MODEL: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "ffn_hidden_size": 160,
    "gated_linear_unit": True,
    "activation_func": "silu",
    "add_bias_linear": False,
    "normalization": "RMSNorm",
    "vocab_size": 1000,
    "max_position_embeddings": 64,
    "position_embedding_type": "rope",
    "rotary_base": 500000,
    "share_embeddings_and_output_weights": True,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}
SPEC = TrialSpec(
    model=MODEL, config={}, world_size=4, seq_length=128, global_batch_size=8, device="cpu"
)


@pytest.fixture(scope="module", autouse=True)
def megatron_core() -> None:
    from trainables.megatron_core.cpu_device import without_compilation

    with without_compilation():
        import megatron.core.models.gpt
        import megatron.core.optimizer  # noqa: F401


def plan_of(transformer_engine: bool = False, device: str = "cpu", **config: Any) -> Any:
    from trainables.megatron_core.plan import build_plan

    return build_plan(replace(SPEC, config=config, device=device), transformer_engine)


def test_fields_go_to_every_class_that_has_them() -> None:
    plan = plan_of(use_distributed_optimizer=True, overlap_param_gather=True, lr=0.1)
    assert plan.ddp["use_distributed_optimizer"] is True
    assert plan.optimizer["use_distributed_optimizer"] is True
    assert plan.ddp["overlap_param_gather"] is True
    assert plan.optimizer["overlap_param_gather"] is True
    assert plan.optimizer["lr"] == 0.1
    assert "lr" not in plan.transformer


def test_model_arguments_reach_the_model() -> None:
    assert plan_of().model == {
        "position_embedding_type": "rope",
        "rotary_base": 500000,
        "share_embeddings_and_output_weights": True,
    }


def test_an_unknown_field_names_the_nearest_known_one() -> None:
    with pytest.raises(TrialSpecError, match="did you mean 'overlap_grad_reduce'"):
        plan_of(overlap_grad_reduction=True)


def test_a_field_like_nothing_known_is_to_be_removed() -> None:
    with pytest.raises(TrialSpecError, match=r"'zzzz' is none of .*; remove it"):
        plan_of(zzzz=1)


def test_the_environment_is_not_a_megatron_field() -> None:
    assert "env" not in plan_of(env={"A": "1"}).transformer


def test_a_yarn_setting_becomes_an_attribute_of_the_configuration() -> None:
    plan = plan_of(yarn_mscale=1.5)
    assert plan.transformer_config().yarn_mscale == 1.5


def test_yarn_settings_that_a_model_leaves_open_are_there() -> None:
    plan = plan_of(position_embedding_type="yarn", yarn_mscale_all_dim=2.0)
    config = plan.transformer_config()
    assert (config.yarn_mscale, config.yarn_mscale_all_dim) == (None, 2.0)


@pytest.mark.parametrize(("tensor", "padded"), [(1, 1024), (2, 1024), (4, 1024)])
def test_the_vocabulary_is_padded_to_the_tensor_parallel_size(tensor: int, padded: int) -> None:
    assert plan_of(tensor_model_parallel_size=tensor).vocab_size == padded
    assert plan_of(make_vocab_size_divisible_by=300).vocab_size == 1200


def test_the_sequence_fits_the_position_embeddings() -> None:
    assert plan_of().max_sequence_length == 128


@pytest.mark.parametrize(("precision", "bf16"), [("bf16", True), ("fp32", False)])
def test_precision_sets_parameter_and_pipeline_dtypes(precision: str, bf16: bool) -> None:
    import torch

    from trainables.megatron_core.plan import build_plan

    config = build_plan(replace(SPEC, precision=precision), False).transformer_config()
    assert config.bf16 is bf16
    assert config.params_dtype == config.pipeline_dtype
    assert config.params_dtype == (torch.bfloat16 if bf16 else torch.float32)


def test_an_unknown_precision_is_refused() -> None:
    from trainables.megatron_core.plan import build_plan

    with pytest.raises(TrialSpecError, match="precision='int4'"):
        build_plan(replace(SPEC, precision="int4"), False)


def test_context_parallelism_on_the_cpu_is_refused() -> None:
    with pytest.raises(TrialSpecError, match="context_parallel_size > 1"):
        plan_of(context_parallel_size=2)


@pytest.mark.parametrize(
    ("fields", "fused"),
    [
        ({"activation_func": "silu", "gated_linear_unit": True}, True),
        ({"activation_func": "silu", "gated_linear_unit": False}, False),
        ({"activation_func": "gelu", "gated_linear_unit": False, "add_bias_linear": True}, True),
        ({"activation_func": "gelu", "gated_linear_unit": False, "add_bias_linear": False}, False),
        ({"activation_func": "gelu", "gated_linear_unit": True}, True),
        ({"activation_func": "squared_relu", "gated_linear_unit": False}, False),
        ({"activation_func": "relu", "gated_linear_unit": False}, False),
        ({"activation_func": "quick_gelu", "gated_linear_unit": True}, False),
        ({"activation_func": "quick_gelu", "num_moe_experts": 4}, True),
        ({"activation_func": "quick_gelu", "num_moe_experts": 4, "moe_layer_freq": 2}, False),
        ({"activation_func": "silu", "num_moe_experts": 4}, True),
        ({"activation_func": "silu", "num_moe_experts": 4, "add_bias_linear": True}, False),
        ({"activation_func": "gelu", "num_moe_experts": 4}, False),
    ],
)
def test_the_activation_is_fused_where_megatron_can(fields: dict, fused: bool) -> None:
    config = plan_of(**fields).transformer_config()
    assert config.bias_activation_fusion is fused


def test_a_candidates_choice_beats_the_default_fusion() -> None:
    assert plan_of(bias_activation_fusion=False).transformer["bias_activation_fusion"] is False


@pytest.mark.parametrize(
    ("device", "virtual", "overlap", "batch"),
    [
        ("cpu", None, False, False),
        ("cpu", 2, False, False),
        ("cuda", None, False, True),
        ("cuda", 2, True, False),
    ],
)
def test_pipeline_transfers_follow_device_and_schedule(
    device: str, virtual: int | None, overlap: bool, batch: bool
) -> None:
    transformer = plan_of(
        device=device,
        pipeline_model_parallel_size=2,
        virtual_pipeline_model_parallel_size=virtual,
    ).transformer
    assert transformer["overlap_p2p_comm"] is overlap
    assert transformer["batch_p2p_comm"] is batch


def test_mixtures_of_experts_use_all_to_all_and_grouped_gemm_on_transformer_engine() -> None:
    experts = {"num_moe_experts": 4, "moe_ffn_hidden_size": 64}
    local = plan_of(**experts).transformer
    assert local["moe_token_dispatcher_type"] == "alltoall"
    assert local["moe_grouped_gemm"] is False
    grouped = plan_of(transformer_engine=True, device="cuda", **experts).transformer
    assert grouped["moe_grouped_gemm"] is True


def test_cuda_graphs_reach_the_configuration_in_the_installed_spelling() -> None:
    config = plan_of(
        transformer_engine=True,
        device="cuda",
        cuda_graph_impl="full_iteration",
        use_te_rng_tracker=True,
    ).transformer
    installed = {"cuda_graph_impl", "cuda_graph_scope", "cuda_graph_modules"} & set(config)
    assert len(installed) == 2
    from trainables.megatron_core.graphs import captures_full_iteration

    class Config:
        cuda_graph_impl = config["cuda_graph_impl"]
        cuda_graph_scope = config.get("cuda_graph_scope")

    assert captures_full_iteration(Config())


def test_offload_and_fp8_fields_pass_through() -> None:
    plan = plan_of(
        transformer_engine=True,
        device="cuda",
        cpu_offloading=True,
        cpu_offloading_num_layers=2,
        fp8="hybrid",
        fp8_recipe="tensorwise",
        fp8_param_gather=True,
        optimizer_cpu_offload=True,
        optimizer_offload_fraction=0.5,
    )
    assert plan.transformer["cpu_offloading_num_layers"] == 2
    assert plan.transformer["fp8"] == "hybrid"
    assert plan.transformer["fp8_recipe"] == plan.optimizer["fp8_recipe"] == "tensorwise"
    assert plan.ddp["fp8_param_gather"] is True
    assert plan.optimizer["optimizer_offload_fraction"] == 0.5


def test_names_become_functions_dtypes_and_enums() -> None:
    import torch
    from megatron.core.transformer.enums import AttnBackend

    plan = plan_of(
        exp_avg_dtype="bf16",
        moe_router_dtype="fp32",
        attention_backend="flash",
        window_size=[128, 0],
    )
    assert plan.transformer["activation_func"] is torch.nn.functional.silu
    assert plan.optimizer["exp_avg_dtype"] is torch.bfloat16
    assert plan.transformer["moe_router_dtype"] == "fp32"
    assert plan.transformer["attention_backend"] is AttnBackend.flash
    assert plan.transformer["window_size"] == (128, 0)


@pytest.mark.parametrize(
    ("field", "value"), [("activation_func", "tanh"), ("exp_avg_dtype", "float7")]
)
def test_names_that_mean_nothing_are_refused(field: str, value: str) -> None:
    with pytest.raises(TrialSpecError, match=value):
        plan_of(**{field: value})


def test_latent_attention_uses_its_own_configuration() -> None:
    config = plan_of(multi_latent_attention=True, kv_lora_rank=16).transformer_config()
    assert type(config).__name__ == "MLATransformerConfig"
    assert config.kv_lora_rank == 16


@pytest.mark.parametrize(("bias", "fused"), [(True, False), (False, True)])
def test_dropout_is_fused_unless_experts_have_a_bias(bias: bool, fused: bool) -> None:
    plan = plan_of(num_moe_experts=2, add_bias_linear=bias)
    assert plan.transformer["bias_dropout_fusion"] is fused
