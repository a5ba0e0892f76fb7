"""Exact parameter counts of a model, in total and by piece."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tuner.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class ParameterCounts:
    """How many parameters a model has, and where.

    Counts are those of Megatron-Core's `GPTModel` without tensor, expert or pipeline parallelism.
    Pieces of a layer are for *one* layer (`attention`, `dense_mlp`, `router`, `shared_experts`,
    `layer_norms`) or one expert (`expert`); `embedding`, `output_layer` and `final_norm` occur
    once. `output_layer` is 0 when it shares the embedding. `prediction_layer` is one layer of
    multi-token prediction, its decoder layer included; its embedding and output are the model's.
    """

    vocab_size: int
    embedding: int
    position_embedding: int
    attention: int
    layer_norms: int
    dense_mlp: int
    router: int
    expert: int
    shared_experts: int
    final_norm: int
    output_layer: int
    prediction_layer: int
    dense_layers: int
    moe_layers: int
    prediction_layers: int
    num_experts: int
    router_topk: int
    last_layer_is_moe: bool

    @property
    def dense_layer(self) -> int:
        """All parameters of one layer with a dense MLP."""
        return self.attention + self.layer_norms + self.dense_mlp

    @property
    def moe_layer(self) -> int:
        """All parameters of one mixture-of-experts layer, every expert included."""
        experts = self.num_experts * self.expert
        return self.attention + self.layer_norms + self.router + self.shared_experts + experts

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
            + self.dense_layers * self.dense_layer
            + self.moe_layers * self.moe_layer
            + self.final_norm
            + self.output_layer
            + self.prediction
        )

    @property
    def active(self) -> int:
        """Parameters that one token meets: `total` without the experts it is not routed to."""
        moe_layers = self.moe_layers + self.last_layer_is_moe * self.prediction_layers
        return self.total - moe_layers * (self.num_experts - self.router_topk) * self.expert


def count_parameters(spec: ModelSpec, *, vocab_size: int | None = None) -> ParameterCounts:
    """Count the parameters of `spec`.

    `vocab_size` is the number of embedding rows: the plain vocabulary by default, which is what
    model cards count; pass `spec.padded_vocab_size(tp)` for what a training job allocates.
    """
    rows = spec.vocab_size if vocab_size is None else vocab_size
    hidden = spec.hidden_size
    moe_pattern = spec.moe_layer_pattern
    learned = spec.position_embedding_type == "learned_absolute"
    norm = _norm(spec, hidden)
    pieces = ParameterCounts(
        vocab_size=rows,
        embedding=rows * hidden,
        position_embedding=(spec.max_position_embeddings or 0) * hidden if learned else 0,
        attention=_latent_attention(spec) if spec.multi_latent_attention else _attention(spec),
        layer_norms=2 * norm,
        dense_mlp=_mlp(spec, spec.ffn_hidden_size),
        router=_router(spec),
        expert=_mlp(spec, spec.moe_ffn_hidden_size) if spec.moe_ffn_hidden_size else 0,
        shared_experts=_shared_experts(spec),
        final_norm=norm,
        output_layer=0 if spec.share_embeddings_and_output_weights else rows * hidden,
        prediction_layer=0,
        dense_layers=spec.num_layers - sum(moe_pattern),
        moe_layers=sum(moe_pattern),
        prediction_layers=spec.mtp_num_layers or 0,
        num_experts=spec.num_moe_experts or 0,
        router_topk=spec.moe_router_topk if spec.num_moe_experts else 0,
        last_layer_is_moe=moe_pattern[-1],
    )
    return _with_prediction(pieces, norm, hidden)


def _with_prediction(pieces: ParameterCounts, norm: int, hidden: int) -> ParameterCounts:
    """Add multi-token prediction, whose layer repeats the decoder's last one.

    It holds two input norms, the projection of the joined input and a norm of its own
    (`MultiTokenPredictionLayer` in megatron/core/transformer/multi_token_prediction.py).
    """
    if not pieces.prediction_layers:
        return pieces
    decoder_layer = pieces.moe_layer if pieces.last_layer_is_moe else pieces.dense_layer
    return replace(pieces, prediction_layer=decoder_layer + 3 * norm + 2 * hidden * hidden)


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


def _sinks(spec: ModelSpec) -> int:
    """One learnable softmax offset for each head."""
    return spec.num_attention_heads if spec.softmax_type == "learnable" else 0


def _mlp(spec: ModelSpec, width: int) -> int:
    inner = 2 * width if spec.gated_linear_unit else width
    bias = spec.add_bias_linear
    return _linear(spec.hidden_size, inner, bias) + _linear(width, spec.hidden_size, bias)


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
