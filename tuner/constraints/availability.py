"""Rule V01: the version or front end has no such field."""

from __future__ import annotations

from collections.abc import Mapping

from tuner.constraints.fields import Field, catalogue, nearest

# Fields of Megatron-Core's configs that no command-line argument of Megatron-LM sets.
NO_ARGUMENT = frozenset(
    (
        *("activation_func_fp8_input_store", "decoupled_weight_decay", "softmax_scale"),
        *("moe_router_topk_limited_devices", "moe_token_dropping", "fused_single_qkv_rope"),
        *("fp8_dot_product_attention", "fp8_multi_head_attention", "tp_only_amax_red"),
        *("tp_comm_overlap_disable_fc1", "tp_comm_overlap_disable_qkv"),
        *("tp_comm_atomic_ag", "tp_comm_atomic_rs", "memory_efficient_layer_norm"),
        *("cuda_graph_retain_backward_graph", "cuda_graph_use_single_mempool"),
        *("disable_parameter_transpose_cache", "heterogeneous_block_specs", "test_mode"),
    )
)

# The message and the fix; a null in the fix removes the field.
Unavailable = tuple[str, Mapping[str, object] | None]


def unavailable(
    name: str,
    field: Field | None,
    config: Mapping[str, object],
    version: str,
    frontend: str,
) -> Unavailable | None:
    """Why the field cannot be used, with a fix where there is one; None when it can."""
    if field is None:
        known = [n for n, f in catalogue().items() if version in f.default]
        similar = nearest(name, known)
        hint = f"; did you mean {similar}?" if similar else ""
        return f"unknown field {name!r}{hint}", {name: None}
    if version not in field.default and version not in field.also.get(frontend, ()):
        versions = ", ".join(field.default) or "Megatron Bridge only"
        return f"Megatron-Core {version} has no field {name} (it is in {versions})", {name: None}
    if frontend == "megatron-lm" and name in NO_ARGUMENT:
        return f"Megatron-LM {version} has no argument for {name}", {name: None}
    if field.only_mla and not config.get("multi_latent_attention"):
        return (
            f"{name} exists only with multi_latent_attention",
            {"multi_latent_attention": True},
        )
    return None
