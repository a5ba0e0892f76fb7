"""Model FLOPs of a training step, as Megatron Bridge counts them from release 0.5.0.

Source of the definition: `num_floating_point_operations` in
src/megatron/bridge/training/utils/flop_utils.py of NVIDIA-NeMo/Megatron-Bridge. Three times the
forward GEMMs (a multiply-add is two operations); attention over the causal half of the sequence;
logits over the padded vocabulary, once more for each multi-token prediction layer; nothing for
recomputation, routers, activations or most norms.
"""

from __future__ import annotations

from tuner.models.hybrid import ATTENTION, EXPERTS, MAMBA, MLP, HybridPattern
from tuner.models.spec import ModelSpec

_FORWARD_AND_BACKWARD = 3  # the backward pass computes two GEMMs for each forward one


def model_flops_per_step(
    spec: ModelSpec,
    seq_length: int,
    global_batch_size: int,
    *,
    tensor_model_parallel_size: int = 1,
) -> int:
    """FLOPs of one optimizer step over `global_batch_size` sequences of `seq_length` tokens.

    Tensor parallelism enters only through the padding of the vocabulary. The count is exact: no
    floating-point arithmetic. Raises `ValueError` for sizes below 1.
    """
    for label, value in (
        ("seq_length", seq_length),
        ("global_batch_size", global_batch_size),
        ("tensor_model_parallel_size", tensor_model_parallel_size),
    ):
        if value < 1:
            raise ValueError(f"{label}={value} must be a positive integer")
    if spec.hybrid_pattern is not None:
        forward = _hybrid_operations(spec, spec.hybrid_pattern, seq_length)
        logits = 2 * seq_length * _logit_multiply_adds(spec, tensor_model_parallel_size)
        return _FORWARD_AND_BACKWARD * global_batch_size * (forward + logits)
    multiply_adds_per_token = (
        _mlp_multiply_adds(spec)
        + _projection_multiply_adds(spec)
        + _prediction_multiply_adds(spec)
        + _logit_multiply_adds(spec, tensor_model_parallel_size)
    )
    forward_per_sequence = 2 * multiply_adds_per_token * seq_length + _core_attention_operations(
        spec, seq_length
    )
    return _FORWARD_AND_BACKWARD * global_batch_size * forward_per_sequence


def _prediction_layers(spec: ModelSpec) -> int:
    return spec.mtp_num_layers or 0


def _mlp_multiply_adds(spec: ModelSpec) -> int:
    """Multiply-adds of one token in every MLP: dense, routed (top-k) and shared experts."""
    pattern = spec.moe_layer_pattern
    moe_layers = sum(pattern) + pattern[-1] * _prediction_layers(spec)
    dense_layers = spec.num_layers + _prediction_layers(spec) - moe_layers
    dense = _gemms(spec) * spec.hidden_size * spec.ffn_hidden_size
    return dense * dense_layers + _mixture_multiply_adds(spec) * moe_layers


def _gemms(spec: ModelSpec) -> int:
    """Products of an MLP."""
    return 3 if spec.gated_linear_unit else 2


def _mixture_multiply_adds(spec: ModelSpec) -> int:
    """Multiply-adds of one token in one layer of experts, and in the projections around them."""
    channels = spec.moe_latent_size or spec.hidden_size
    routed = channels * (spec.moe_ffn_hidden_size or 0) * spec.moe_router_topk
    shared = spec.hidden_size * (spec.moe_shared_expert_intermediate_size or 0)
    projections = 2 * spec.hidden_size * (spec.moe_latent_size or 0)
    return _gemms(spec) * (routed + shared) + projections


def _linear_attention_layers(spec: ModelSpec) -> int:
    """Layers of linear attention; those of prediction are like the decoder's last one."""
    pattern = spec.linear_attention_pattern
    return sum(pattern) + pattern[-1] * _prediction_layers(spec)


def _linear_attention_multiply_adds(spec: ModelSpec) -> int:
    """Multiply-adds of one token in one layer with a gated delta net."""
    keys = spec.linear_num_key_heads * spec.linear_key_head_dim
    values = spec.linear_num_value_heads * spec.linear_value_head_dim
    return (
        spec.hidden_size * (2 * keys + 2 * values + 2 * spec.linear_num_value_heads)
        + spec.linear_conv_kernel_dim * (2 * keys + values)
        + spec.linear_num_value_heads * spec.linear_value_head_dim**2 * 4
        + spec.hidden_size * values
    )


def _hybrid_operations(spec: ModelSpec, pattern: HybridPattern, seq_length: int) -> int:
    """Forward operations of one sequence in the layers of a hybrid model.

    Bridge takes the inner width of a Mamba layer as twice the hidden size, whatever its heads.
    """
    hidden = spec.hidden_size
    letters = pattern.all_layers
    inner = 2 * hidden
    states = 2 * spec.mamba_num_groups * spec.mamba_state_dim
    mamba = 2 * hidden * (2 * inner + states + spec.mamba_heads)
    mamba += 7 * inner * spec.mamba_state_dim + 2 * inner * hidden
    per_token = (
        letters.count(MAMBA) * mamba
        + letters.count(MLP) * 2 * _gemms(spec) * hidden * spec.ffn_hidden_size
        + letters.count(EXPERTS) * 2 * _mixture_multiply_adds(spec)
        + letters.count(ATTENTION)
        * 4
        * hidden
        * spec.kv_channels
        * (spec.num_attention_heads + spec.num_query_groups)
    )
    windows = spec.window_layer_pattern
    windowed = sum(
        windows[index] for index, letter in enumerate(pattern.decoder) if letter == ATTENTION
    )
    pairs_doubled = (letters.count(ATTENTION) - windowed) * seq_length**2
    pairs_doubled += windowed * _window_pairs_doubled(spec, seq_length)
    core = 2 * spec.kv_channels * spec.num_attention_heads * pairs_doubled
    return per_token * seq_length + core


def _projection_multiply_adds(spec: ModelSpec) -> int:
    """Multiply-adds of one token in the attention projections of every layer."""
    linear = _linear_attention_layers(spec)
    layers = spec.num_layers + _prediction_layers(spec) - linear
    if spec.multi_latent_attention:
        return layers * _latent_projection(spec)
    query = spec.kv_channels * spec.num_attention_heads
    key_value = 2 * spec.kv_channels * spec.num_query_groups
    gate = query if spec.attention_output_gate else 0
    standard = layers * spec.hidden_size * (2 * query + key_value + gate)
    return standard + linear * _linear_attention_multiply_adds(spec)


def _latent_projection(spec: ModelSpec) -> int:
    """Multi-latent attention: low-rank query and key-value paths (norms counted once each)."""
    hidden, heads = spec.hidden_size, spec.num_attention_heads
    query_width = heads * (spec.qk_head_dim + spec.qk_pos_emb_head_dim)
    if spec.q_lora_rank is None:
        query = hidden * query_width
    else:
        query = spec.q_lora_rank * (hidden + query_width + 1)
    key_value_width = heads * (spec.qk_head_dim + spec.v_head_dim)
    key_value = spec.kv_lora_rank * (hidden + key_value_width + 1)
    key_value += hidden * spec.qk_pos_emb_head_dim
    output = heads * spec.v_head_dim * hidden
    return query + key_value + output


def _core_attention_operations(spec: ModelSpec, seq_length: int) -> int:
    """Forward operations of one sequence in scores and weighted values of every layer."""
    layers = spec.num_layers + _prediction_layers(spec)
    causal_pairs_doubled = seq_length**2
    if spec.multi_latent_attention:
        width = spec.qk_head_dim + spec.qk_pos_emb_head_dim + spec.v_head_dim
        return layers * spec.num_attention_heads * width * causal_pairs_doubled
    layers -= _linear_attention_layers(spec)
    windowed = sum(spec.window_layer_pattern)
    pairs_doubled = (layers - windowed) * causal_pairs_doubled
    pairs_doubled += windowed * _window_pairs_doubled(spec, seq_length)
    return 2 * spec.kv_channels * spec.num_attention_heads * pairs_doubled


def _window_pairs_doubled(spec: ModelSpec, seq_length: int) -> int:
    """Twice the query-key pairs of one sequence under the sliding window.

    A window that is unlimited or at least as long as the sequence counts as full causal
    attention, which Bridge takes as half the square, without the diagonal's half.
    """
    if spec.window_size is None or -1 in spec.window_size:
        return seq_length**2
    window = spec.window_size[0] + spec.window_size[1] + 1
    if window >= seq_length:
        return seq_length**2
    return 2 * window * seq_length - window * (window - 1)


def _prediction_multiply_adds(spec: ModelSpec) -> int:
    """Norms and input projection of the multi-token prediction layers, one token."""
    return _prediction_layers(spec) * (3 * spec.hidden_size + 2 * spec.hidden_size**2)


def _logit_multiply_adds(spec: ModelSpec, tensor_model_parallel_size: int) -> int:
    vocabulary = spec.padded_vocab_size(tensor_model_parallel_size)
    return spec.hidden_size * vocabulary * (_prediction_layers(spec) + 1)


def unit_flops(spec: ModelSpec, seq_length: int) -> tuple[float, float, float]:
    """Forward FLOPs of one sequence in a layer (on average), in all multi-token prediction layers
    with their logits, and in the logits of the model itself."""
    logits = 2.0 * seq_length * _logit_multiply_adds(spec, 1) / (1 + _prediction_layers(spec))
    whole = model_flops_per_step(spec, seq_length, 1) / _FORWARD_AND_BACKWARD
    if not _prediction_layers(spec):
        return (whole - logits) / spec.num_layers, 0.0, logits
    layers = spec.num_layers + _prediction_layers(spec)
    layer = (whole - logits * (1 + _prediction_layers(spec))) / layers
    return layer, _prediction_layers(spec) * (layer + logits), logits
