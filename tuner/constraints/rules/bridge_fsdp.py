"""Megatron Bridge: Megatron FSDP, checkpoint formats and settings kept in two places."""

from __future__ import annotations

from typing import Any

from tuner.constraints.registry import UNCHANGED, derived, handed_over, rewrite, rule

VALIDATE = "bridge/training/config.py: ConfigContainer.validate"
SYNC = "bridge/training/config.py: _validate_and_sync_distributed_optimizer_settings"
_BRIDGE = ("bridge",)


@derived
def fsdp_drops_collective_average(c: Any) -> bool:
    """Megatron FSDP turns average_in_collective off (from Bridge 0.4 only with symmetric
    registration)."""
    registered = c.minor < 17 or not c.disable_symmetric_registration
    return bool(c.use_megatron_fsdp and registered)


@handed_over("bridge", "average_in_collective")
def average_after_fsdp(c: Any) -> bool:
    """Turned off by Megatron FSDP."""
    return bool(c.average_in_collective and not c.fsdp_drops_collective_average)


@rewrite("D14", "average_in_collective", VALIDATE, frontends=_BRIDGE, layer="given")
def fsdp_turns_collective_average_off(c: Any) -> object:
    """Megatron FSDP turns it off."""
    return False if c.fsdp_drops_collective_average else UNCHANGED


@rewrite(
    "D14",
    "gradient_accumulation_fusion",
    VALIDATE,
    until="0.16.1",
    frontends=_BRIDGE,
    layer="given",
)
def fsdp_turns_accumulation_fusion_off(c: Any) -> object:
    """Megatron FSDP turns it off in Bridge 0.3."""
    return False if c.use_megatron_fsdp else UNCHANGED


@rewrite("D14", "reuse_grad_buf_for_mxfp8_param_ag", VALIDATE, frontends=_BRIDGE, layer="given")
def fsdp_turns_buffer_reuse_off(c: Any) -> object:
    """Megatron FSDP turns it off."""
    return False if c.use_megatron_fsdp else UNCHANGED


@rewrite(
    "D14",
    "use_distributed_optimizer",
    VALIDATE,
    since="0.18.0",
    frontends=_BRIDGE,
    layer="given",
)
def fsdp_turns_distributed_optimizer_on(c: Any) -> object:
    """Megatron FSDP turns it on from Bridge 0.5."""
    return True if c.use_megatron_fsdp else UNCHANGED


@rewrite(
    "D14",
    "fsdp_manual_registration",
    VALIDATE,
    since="0.18.0",
    frontends=_BRIDGE,
    layer="given",
)
def fsdp_user_buffers_are_registered(c: Any) -> object:
    """Megatron FSDP with nccl_ub registers buffers by hand from Bridge 0.5."""
    return True if c.use_megatron_fsdp and c.nccl_ub else UNCHANGED


@rewrite(
    "D14",
    "megatron_fsdp_use_decoupled_grad",
    VALIDATE,
    since="0.18.0",
    frontends=_BRIDGE,
    layer="given",
)
def fsdp_decouples_gradients(c: Any) -> object:
    """Megatron FSDP with the precision-aware optimizer keeps decoupled gradients."""
    both = c.use_megatron_fsdp and c.use_precision_aware_optimizer
    return True if both else UNCHANGED


@rule(
    "D12",
    VALIDATE,
    since="0.18.0",
    frontends=_BRIDGE,
    fix=[lambda c: {"env": {k: v for k, v in c.env.items() if k != "CUDA_DEVICE_MAX_CONNECTIONS"}}],
)
def fsdp_needs_more_connections(c: Any) -> str | None:
    """Megatron FSDP with CUDA_DEVICE_MAX_CONNECTIONS=1."""
    if c.use_megatron_fsdp and str(c.env.get("CUDA_DEVICE_MAX_CONNECTIONS", "")) == "1":
        return "Megatron FSDP needs CUDA_DEVICE_MAX_CONNECTIONS above 1 or unset"
    return None


@rule(
    "D22",
    VALIDATE,
    since="0.18.0",
    frontends=_BRIDGE,
    fix=[{"nccl_ub": True}, {"fsdp_manual_registration": False}],
)
def fsdp_registration_needs_user_buffers(c: Any) -> str | None:
    """fsdp_manual_registration without nccl_ub."""
    if c.use_megatron_fsdp and c.fsdp_manual_registration and not c.nccl_ub:
        return "registering buffers by hand needs nccl_ub"
    return None


@rule("D13", VALIDATE, frontends=_BRIDGE, fix=[{"ckpt_format": "fsdp_dtensor"}])
def fsdp_saves_its_own_format(c: Any) -> str | None:
    """Megatron FSDP that saves or loads another format than fsdp_dtensor."""
    if c.use_megatron_fsdp and c.ckpt_format not in (None, "fsdp_dtensor"):
        return f"Megatron FSDP saves fsdp_dtensor checkpoints, not {c.ckpt_format}"
    return None


@rule("D21", VALIDATE, frontends=_BRIDGE, fix=[{"ckpt_format": "torch_dist"}])
def fsdp_format_needs_fsdp(c: Any) -> str | None:
    """ckpt_format fsdp_dtensor without Megatron FSDP, or with torch FSDP2."""
    if c.ckpt_format == "fsdp_dtensor" and (not c.use_megatron_fsdp or c.use_torch_fsdp2):
        return "fsdp_dtensor checkpoints are those of Megatron FSDP"
    return None
