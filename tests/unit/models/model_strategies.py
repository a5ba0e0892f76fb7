"""Random architectures for property tests."""

from hypothesis import strategies as st

from tuner.models import ModelSpec
from tuner.models.spec import ACTIVATIONS

sizes = st.integers(1, 64)
ratios = st.floats(0.0, 1.0, allow_nan=False)


@st.composite
def flat_models(draw) -> dict:
    """A valid flat mapping, with and without the fields that may be left out."""
    groups = draw(st.integers(1, 8))
    layers = draw(st.integers(1, 12))
    flat = {
        "num_layers": layers,
        "hidden_size": draw(st.integers(8, 256)),
        "num_attention_heads": groups * draw(st.integers(1, 8 // groups)),
        "vocab_size": draw(st.integers(1, 5000)),
        "max_position_embeddings": draw(sizes),
    }
    optional = {
        "num_query_groups": st.just(groups),
        "kv_channels": sizes,
        "ffn_hidden_size": sizes,
        "gated_linear_unit": st.booleans(),
        "activation_func": st.sampled_from(ACTIVATIONS),
        "normalization": st.sampled_from(["LayerNorm", "RMSNorm"]),
        "qk_layernorm": st.booleans(),
        "softmax_type": st.sampled_from(["vanilla", "off-by-one", "learnable"]),
        "window_size": st.lists(st.integers(-1, 40), min_size=2, max_size=2),
        "window_attn_skip_freq": frequencies(layers),
        "hidden_dropout": ratios,
        "position_embedding_type": st.sampled_from(["learned_absolute", "rope", "yarn", "none"]),
        "share_embeddings_and_output_weights": st.booleans(),
        "make_vocab_size_divisible_by": sizes,
        "mtp_num_layers": st.integers(1, 3),
        "rotary_base": st.floats(1.0, 1e7),
    }
    for field, strategy in optional.items():
        if draw(st.booleans()):
            flat[field] = draw(strategy)
    if draw(st.booleans()):
        flat |= draw(experts(layers))
    if draw(st.booleans()):
        flat |= draw(latent_attention())
    return flat


def frequencies(layers: int):
    pattern = st.lists(st.integers(0, 1), min_size=layers, max_size=layers)
    return st.one_of(st.integers(1, 5), pattern)


@st.composite
def experts(draw, layers: int) -> dict:
    groups = draw(st.integers(1, 4))
    count = groups * draw(st.integers(1, 4))
    flat = {
        "num_moe_experts": count,
        "moe_router_topk": draw(st.integers(1, count)),
        "moe_layer_freq": draw(frequencies(layers)),
        "add_bias_linear": False,
    }
    if draw(st.booleans()):
        flat["moe_ffn_hidden_size"] = draw(sizes)
        flat["moe_shared_expert_intermediate_size"] = draw(sizes)
        flat["moe_router_num_groups"] = groups
        flat["moe_router_group_topk"] = draw(st.integers(1, groups))
    return flat


@st.composite
def latent_attention(draw) -> dict:
    return {
        "multi_latent_attention": True,
        "q_lora_rank": draw(st.one_of(st.none(), sizes)),
        "kv_lora_rank": draw(sizes),
        "qk_head_dim": draw(sizes),
        "qk_pos_emb_head_dim": draw(sizes),
        "v_head_dim": draw(sizes),
    }


models = flat_models().map(lambda flat: ModelSpec.from_flat(flat, name="random"))
