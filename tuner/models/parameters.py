"""Exact parameter counts of a model, in total and by piece."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tuner.models.hybrid import ATTENTION, EXPERTS, MAMBA, MLP
from tuner.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class ParameterCounts:
    """How many parameters a model has, and where.

    Counts are those of Megatron-Core's `GPTModel`, or its model of hybrid layers, without tensor,
    expert or pipeline parallelism. Pieces of a layer are for *one* layer (`attention`,
    `linear_attention`, `mamba`, `dense_mlp`, `router`, `latent_projections`, `shared_experts`,
    `layer_norms`) or one expert (`expert`); `embedding`, `output_layer` and `final_norm` occur
    once. `output_layer` is 0 when it shares the embedding. `prediction_layer` is one depth of
    multi-token prediction, its decoder layers included; its embedding and output are the model's.
    `attention_layers`, `linear_attention_layers`, `mamba_layers`, `dense_layers` and `moe_layers`
    say how many decoder layers have such a piece: two each in a transformer, one in a hybrid model.
    """

    vocab_size: int
    embedding: int
    position_embedding: int
    attention: int
    linear_attention: int
    mamba: int
    layer_norms: int
    dense_mlp: int
    router: int
    latent_projections: int
    expert: int
    shared_experts: int
    final_norm: int
    output_layer: int
    prediction_layer: int
    layers: int
    attention_layers: int
    linear_attention_layers: int
    mamba_layers: int
    dense_layers: int
    moe_layers: int
    prediction_layers: int
    num_experts: int
    router_topk: int
    prediction_moe_layers: int

    @property
    def dense_layer(self) -> int:
        """All parameters of one layer with a dense MLP."""
        return self.attention + self.layer_norms + self.dense_mlp

    @property
    def moe_layer(self) -> int:
        """All parameters of one transformer layer of experts, every expert included."""
        return self.attention + self.layer_norms + self.mixture

    @property
    def mixture(self) -> int:
        """Router, every expert, shared experts and projections around them."""
        experts = self.num_experts * self.expert
        return self.router + self.latent_projections + self.shared_experts + experts

    @property
    def prediction(self) -> int:
        """All parameters of multi-token prediction."""
        return self.prediction_layers * self.prediction_layer

    @property
    def total(self) -> int:
        """Every parameter of the model, multi-token prediction included."""
        return (
            self.embedding
            + self.position_embedding
            + self.layers * self.layer_norms
            + self.attention_layers * self.attention
            + self.linear_attention_layers * self.linear_attention
            + self.mamba_layers * self.mamba
            + self.dense_layers * self.dense_mlp
            + self.moe_layers * self.mixture
            + self.final_norm
            + self.output_layer
            + self.prediction
        )

    @property
    def active(self) -> int:
        """Parameters that one token meets: `total` without the experts it is not routed to."""
        moe_layers = self.moe_layers + self.prediction_moe_layers * self.prediction_layers
        return self.total - moe_layers * (self.num_experts - self.router_topk) * self.expert


def count_parameters(spec: ModelSpec, *, vocab_size: int | None = None) -> ParameterCounts:
    """Count the parameters of `spec`.

    `vocab_size` is the number of embedding rows: the plain vocabulary by default, which is what
    model cards count; pass `spec.padded_vocab_size(tp)` for what a training job allocates.
    """
    rows = spec.vocab_size if vocab_size is None else vocab_size
    hidden = spec.hidden_size
    learned = spec.position_embedding_type == "learned_absolute"
    norm = _norm(spec, hidden)
    pieces = ParameterCounts(
        vocab_size=rows,
        embedding=rows * hidden,
        position_embedding=(spec.max_position_embeddings or 0) * hidden if learned else 0,
        attention=_latent_attention(spec) if spec.multi_latent_attention else _attention(spec),
        linear_attention=_linear_attention(spec),
        mamba=_mamba(spec),
        layer_norms=norm if spec.hybrid_pattern else 2 * norm,
        dense_mlp=_mlp(spec, spec.ffn_hidden_size),
        router=_router(spec),
        latent_projections=_latent_projections(spec),
        expert=_expert(spec),
        shared_experts=_shared_experts(spec),
        final_norm=norm,
        output_layer=0 if spec.share_embeddings_and_output_weights else rows * hidden,
        prediction_layer=0,
        layers=spec.num_layers,
        **_layer_counts(spec),
        prediction_layers=spec.mtp_num_layers or 0,
        num_experts=spec.num_moe_experts or 0,
        router_topk=spec.moe_router_topk if spec.num_moe_experts else 0,
    )
    return _with_prediction(spec, pieces, norm)


def _layer_counts(spec: ModelSpec) -> dict[str, int]:
    """Decoder layers by what they have, and expert layers of one depth of prediction."""
    pattern = spec.hybrid_pattern
    if pattern is not None:
        return {
            "attention_layers": pattern.decoder.count(ATTENTION),
            "linear_attention_layers": 0,
            "mamba_layers": pattern.decoder.count(MAMBA),
            "dense_layers": pattern.decoder.count(MLP),
            "moe_layers": pattern.decoder.count(EXPERTS),
            "prediction_moe_layers": pattern.prediction.count(EXPERTS),
        }
    linear, experts = sum(spec.linear_attention_pattern), sum(spec.moe_layer_pattern)
    return {
        "attention_layers": spec.num_layers - linear,
        "linear_attention_layers": linear,
        "mamba_layers": 0,
        "dense_layers": spec.num_layers - experts,
        "moe_layers": experts,
        "prediction_moe_layers": int(spec.moe_layer_pattern[-1]),
    }


def _with_prediction(spec: ModelSpec, pieces: ParameterCounts, norm: int) -> ParameterCounts:
    """Add multi-token prediction, which repeats the decoder's last layer or has its own pattern.

    It holds two input norms, the projection of the joined input and a norm of its own
    (`MultiTokenPredictionLayer` in megatron/core/transformer/multi_token_prediction.py). Depths
    that share one layer (`mtp_use_repeated_layer`) are counted once.
    """
    if not pieces.prediction_layers:
        return pieces
    pattern = spec.hybrid_pattern
    if pattern is None:
        layers = pieces.moe_layer if pieces.prediction_moe_layers else pieces.dense_layer
    else:
        sizes = {
            MAMBA: pieces.mamba,
            ATTENTION: pieces.attention,
            MLP: pieces.dense_mlp,
            EXPERTS: pieces.mixture,
        }
        layers = sum(sizes[letter] + pieces.layer_norms for letter in pattern.prediction)
    depths = 1 if spec.mtp_use_repeated_layer else pieces.prediction_layers
    return replace(
        pieces,
        prediction_layers=depths,
        prediction_layer=layers + 3 * norm + 2 * spec.hidden_size**2,
    )


def _norm(spec: ModelSpec, width: int) -> int:
    """A scale, and for LayerNorm a shift."""
    return 2 * width if spec.normalization == "LayerNorm" else width


def _linear(inputs: int, outputs: int, bias: bool) -> int:
    return inputs * outputs + (outputs if bias else 0)


def _attention(spec: ModelSpec) -> int:
    """Grouped-query self-attention of one layer, with its query and key norms and sinks."""
    query = spec.kv_channels * spec.num_attention_heads
    key_value = 2 * spec.kv_channels * spec.num_query_groups
    gate = query if spec.attention_output_gate else 0
    bias = spec.add_bias_linear or spec.add_qkv_bias
    return (
        _linear(spec.hidden_size, query + key_value + gate, bias)
        + _linear(query, spec.hidden_size, spec.add_bias_linear)
        + (2 * _norm(spec, spec.kv_channels) if spec.qk_layernorm else 0)
        + _sinks(spec)
    )


def _latent_attention(spec: ModelSpec) -> int:
    """Multi-latent self-attention of one layer; only its output projection may have a bias."""
    hidden, heads = spec.hidden_size, spec.num_attention_heads
    query_width = heads * (spec.qk_head_dim + spec.qk_pos_emb_head_dim)
    if spec.q_lora_rank is None:
        query = hidden * query_width
        norms = _norm(spec, spec.kv_lora_rank)
    else:
        query = spec.q_lora_rank * (hidden + query_width)
        norms = _norm(spec, spec.kv_lora_rank) + _norm(spec, spec.q_lora_rank)
    key_value = hidden * (spec.kv_lora_rank + spec.qk_pos_emb_head_dim)
    key_value += spec.kv_lora_rank * heads * (spec.qk_head_dim + spec.v_head_dim)
    output = _linear(heads * spec.v_head_dim, hidden, spec.add_bias_linear)
    return query + key_value + output + (norms if spec.qk_layernorm else 0) + _sinks(spec)


def _linear_attention(spec: ModelSpec) -> int:
    """Gated delta net of one layer (`GatedDeltaNet` in megatron/core/ssm/gated_delta_net.py)."""
    if spec.experimental_attention_variant is None:
        return 0
    keys = spec.linear_num_key_heads * spec.linear_key_head_dim
    values = spec.linear_num_value_heads * spec.linear_value_head_dim
    return (
        spec.hidden_size * (2 * keys + 2 * values + 2 * spec.linear_num_value_heads)
        + (2 * keys + values) * spec.linear_conv_kernel_dim
        + 2 * spec.linear_num_value_heads
        + _norm(spec, spec.linear_value_head_dim)
        + values * spec.hidden_size
    )


_MAMBA_CONVOLUTION = 4
"""Width of a Mamba layer's convolution (`MambaMixer`'s d_conv)."""


def _mamba(spec: ModelSpec) -> int:
    """Mixer of one Mamba layer (`MambaMixer` in megatron/core/ssm/mamba_mixer.py)."""
    if spec.hybrid_pattern is None:
        return 0
    heads = spec.mamba_heads
    inner = heads * spec.mamba_head_dim
    states = 2 * spec.mamba_num_groups * spec.mamba_state_dim
    return (
        spec.hidden_size * (2 * inner + states + heads)
        + (inner + states) * (_MAMBA_CONVOLUTION + 1)
        + 3 * heads
        + inner
        + inner * spec.hidden_size
    )


def _sinks(spec: ModelSpec) -> int:
    """One learnable softmax offset for each head."""
    return spec.num_attention_heads if spec.softmax_type == "learnable" else 0


def _mlp(spec: ModelSpec, width: int, hidden: int | None = None) -> int:
    hidden = hidden or spec.hidden_size
    inner = 2 * width if spec.gated_linear_unit else width
    bias = spec.add_bias_linear
    return _linear(hidden, inner, bias) + _linear(width, hidden, bias)


def _expert(spec: ModelSpec) -> int:
    """One expert, which works on `moe_latent_size` channels where that is set."""
    if not spec.moe_ffn_hidden_size:
        return 0
    return _mlp(spec, spec.moe_ffn_hidden_size, spec.moe_latent_size)


def _latent_projections(spec: ModelSpec) -> int:
    """To the channels of the experts and back (`fc1_latent_proj`, `fc2_latent_proj`)."""
    if spec.moe_latent_size is None:
        return 0
    bias = spec.add_bias_linear
    return _linear(spec.hidden_size, spec.moe_latent_size, bias) + _linear(
        spec.moe_latent_size, spec.hidden_size, bias
    )


def _router(spec: ModelSpec) -> int:
    """Routing weights of one layer; the balancing bias is a buffer, not a parameter."""
    if spec.num_moe_experts is None:
        return 0
    return _linear(spec.hidden_size, spec.num_moe_experts, spec.add_bias_linear)


def _shared_experts(spec: ModelSpec) -> int:
    if spec.moe_shared_expert_intermediate_size is None:
        return 0
    gate = spec.hidden_size if spec.moe_shared_expert_gate else 0
    return _mlp(spec, spec.moe_shared_expert_intermediate_size) + gate
