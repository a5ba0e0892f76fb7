"""Parameter counts against the real Megatron-Core `GPTModel`.

The model is built on the `meta` device with the local layer spec, without tensor, pipeline or
expert parallelism: every layer and every expert, up to a trillion parameters, without memory. Its
vocabulary is padded, as in training, so the count is told the padded size.
"""

import dataclasses
import re
from collections import Counter

import pytest

from tuner.models import ModelSpec, count_parameters, get_model, model_names

pytest.importorskip("megatron.core")

PIECES = {
    "embedding": r"^embedding\.word_embeddings\.",
    "position_embedding": r"^embedding\.position_embeddings\.",
    "attention": r"^decoder\.layers\.\d+\.self_attention\.",
    "layer_norms": r"^decoder\.layers\.\d+\.(input_layernorm|pre_mlp_layernorm)\.",
    "dense_mlp": r"^decoder\.layers\.\d+\.mlp\.linear_",
    "router": r"^decoder\.layers\.\d+\.mlp\.router\.",
    "expert": r"^decoder\.layers\.\d+\.mlp\.experts\.",
    "shared_experts": r"^decoder\.layers\.\d+\.mlp\.shared_experts\.",
    "final_norm": r"^decoder\.final_layernorm\.",
    "output_layer": r"^output_layer\.",
    "prediction": r"^mtp\.",
}


@pytest.fixture(scope="module")
def single_process():
    """Megatron's process groups of a world of one, on the CPU, with CUDA tensors sent to meta."""
    import torch
    from megatron.core import parallel_state

    patch = pytest.MonkeyPatch()
    patch.setattr(torch.cuda, "current_device", lambda: torch.device("meta"))
    patch.setattr(torch.cuda, "Stream", object)  # the token dispatcher makes one
    # Without Transformer Engine the names exist but are None, and isinstance() refuses None.
    patch.setattr("megatron.core.transformer.multi_latent_attention.HAVE_TE", False)
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    parallel_state.initialize_model_parallel()
    yield
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()
    patch.undo()


def transformer_config(spec: ModelSpec):
    import torch.nn.functional as functional
    from megatron.core.activations import quick_gelu, squared_relu
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig

    kind = MLATransformerConfig if spec.multi_latent_attention else TransformerConfig
    known = {field.name for field in dataclasses.fields(kind)}
    fields = {key: value for key, value in spec.to_flat().items() if key in known}
    fields["activation_func"] = {
        "gelu": functional.gelu,
        "silu": functional.silu,
        "relu": functional.relu,
        "squared_relu": squared_relu,
        "quick_gelu": quick_gelu,
    }[spec.activation_func]
    # The local norm refuses a zero-centred scale; the number of scales is the same.
    fields["layernorm_zero_centered_gamma"] = False
    config = kind(
        **fields,
        use_cpu_initialization=True,
        perform_initialization=False,
        moe_token_dispatcher_type="alltoall",
    )
    for key, value in spec.to_flat().items():
        if key.startswith("yarn_"):
            setattr(config, key, value)
    config.yarn_mscale = config.yarn_mscale_all_dim = None
    return config


def accept_latent_channels(block) -> None:
    """Let the local core attention be built inside latent attention.

    `MultiLatentAttention` passes channel sizes that `DotProductAttention` does not take; they
    shape no parameter.
    """
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    class LatentDotProductAttention(DotProductAttention):
        def __init__(self, *args, k_channels=None, v_channels=None, **kwargs):
            super().__init__(*args, **kwargs)

    for layer in block.layer_specs:
        layer.submodules.self_attention.submodules.core_attention = LatentDotProductAttention


def real_parameters(spec: ModelSpec) -> dict[str, int]:
    """The size of every named parameter of the real model."""
    import torch
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_decoder_block_spec,
        get_gpt_mtp_block_spec,
    )

    config = transformer_config(spec)
    block = get_gpt_decoder_block_spec(
        config, use_transformer_engine=False, normalization=spec.normalization
    )
    if spec.multi_latent_attention:
        accept_latent_channels(block)
    prediction = get_gpt_mtp_block_spec(config, block, use_transformer_engine=False)
    with torch.device("meta"):
        model = GPTModel(
            config,
            block,
            vocab_size=spec.padded_vocab_size(),
            max_sequence_length=spec.max_position_embeddings or 1024,
            position_embedding_type=spec.position_embedding_type,
            share_embeddings_and_output_weights=spec.share_embeddings_and_output_weights,
            rotary_percent=spec.rotary_percent,
            mtp_block_spec=prediction,
        )
    return {name: parameter.numel() for name, parameter in model.named_parameters()}


def by_piece(sizes: dict[str, int]) -> Counter:
    found: Counter = Counter()
    for name, size in sizes.items():
        matches = [piece for piece, pattern in PIECES.items() if re.match(pattern, name)]
        assert len(matches) == 1, f"{name} belongs to {matches}"
        found[matches[0]] += size
    return found


def expected_by_piece(spec: ModelSpec) -> Counter:
    counts = count_parameters(spec, vocab_size=spec.padded_vocab_size())
    return +Counter(
        {
            "embedding": counts.embedding,
            "position_embedding": counts.position_embedding,
            "attention": counts.attention_layers * counts.attention,
            "layer_norms": counts.layers * counts.layer_norms,
            "dense_mlp": counts.dense_layers * counts.dense_mlp,
            "router": counts.moe_layers * counts.router,
            "expert": counts.moe_layers * counts.num_experts * counts.expert,
            "shared_experts": counts.moe_layers * counts.shared_experts,
            "final_norm": counts.final_norm,
            "output_layer": counts.output_layer,
            "prediction": counts.prediction,
        }
    )


def check(spec: ModelSpec) -> None:
    sizes = real_parameters(spec)
    assert by_piece(sizes) == expected_by_piece(spec)
    counts = count_parameters(spec, vocab_size=spec.padded_vocab_size())
    assert sum(sizes.values()) == counts.total
    padding = spec.padded_vocab_size() - spec.vocab_size
    tables = 1 if spec.share_embeddings_and_output_weights else 2
    assert counts.total - count_parameters(spec).total == padding * tables * spec.hidden_size


@pytest.mark.usefixtures("single_process")
@pytest.mark.parametrize("name", [name for name in model_names() if name.startswith("tiny-")])
def test_tiny_models_have_exactly_the_parameters_of_the_real_model(name):
    check(get_model(name))


def _has_local_layers(name: str) -> bool:
    """Mamba layers and linear attention exist with Transformer Engine alone: see the tests of the
    dry run."""
    spec = get_model(name)
    return spec.hybrid_pattern is None and spec.experimental_attention_variant is None


@pytest.mark.slow
@pytest.mark.usefixtures("single_process")
@pytest.mark.parametrize(
    "name",
    [name for name in model_names() if not name.startswith("tiny-") and _has_local_layers(name)],
)
def test_catalogue_models_in_full_have_exactly_the_parameters_of_the_real_model(name):
    check(get_model(name))


VARIANTS = {
    "dense with relu and RMSNorm": (
        "tiny-dense",
        {"normalization": "RMSNorm", "activation_func": "relu"},
    ),
    "no position embedding": ("tiny-dense", {"position_embedding_type": "none"}),
    "query, key and value bias only": ("tiny-gqa", {"add_qkv_bias": True}),
    "all biases, gated": ("tiny-gqa", {"add_bias_linear": True}),
    "LayerNorm on queries and keys": ("tiny-gqa", {"normalization": "LayerNorm"}),
    "gated attention output": ("tiny-gqa", {"attention_output_gate": True}),
    "untied, odd vocabulary": (
        "tiny-gqa",
        {"share_embeddings_and_output_weights": False, "vocab_size": 1001},
    ),
    "odd head size": ("tiny-gqa", {"kv_channels": 24}),
    "one query group": ("tiny-gqa", {"num_query_groups": 1}),
    "dense multi-token prediction": ("tiny-gqa", {"mtp_num_layers": 2}),
    "experts with biases and sinks": (
        "tiny-moe",
        {"add_bias_linear": True, "softmax_type": "learnable"},
    ),
    "every second layer of experts": ("tiny-moe", {"moe_layer_freq": 2}),
    "experts without gate": ("tiny-moe", {"gated_linear_unit": False, "activation_func": "gelu"}),
    "prediction after a dense layer": (
        "tiny-moe",
        {"moe_layer_freq": (1, 1, 1, 0), "mtp_num_layers": 1},
    ),
    "gated shared expert": ("tiny-mla-moe", {"moe_shared_expert_gate": True}),
    "no query compression": ("tiny-mla-moe", {"q_lora_rank": None}),
    "no latent norms": ("tiny-mla-moe", {"qk_layernorm": False}),
    "latent LayerNorm": ("tiny-mla-moe", {"normalization": "LayerNorm"}),
    "two prediction layers of experts": ("tiny-mla-moe", {"mtp_num_layers": 2}),
    "latent attention, biases": (
        "tiny-mla-moe",
        {"add_bias_linear": True, "moe_shared_expert_intermediate_size": None},
    ),
}


@pytest.mark.usefixtures("single_process")
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_architecture_option_counts_as_the_real_model_does(variant):
    name, changes = VARIANTS[variant]
    check(dataclasses.replace(get_model(name), name=variant, **changes))
