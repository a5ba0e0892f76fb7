"""Export as a Megatron-LM command line."""

from __future__ import annotations

import dataclasses
from typing import Any

from tuner.formats import shell
from tuner.formats.arguments import arguments
from tuner.formats.megatron_fields import RENAMED, tokens_of
from tuner.formats.result import Exported, Settings, exporter
from tuner.models import ModelSpec

_NEEDED_POSITIONS = "max_position_embeddings"


@exporter("megatron-args")
def megatron_args(settings: Settings) -> Exported:
    """Options of `pretrain_gpt.py`: architecture, run shape and the candidate's fields."""
    fields = _fields(settings)
    tokens, left_out = tokens_of(fields, settings.mcore)
    lines = [f"# Megatron-LM options for Megatron-Core {settings.mcore}"]
    lines += [f"# not expressed: {name}: {reason}" for name, reason in left_out.items()]
    lines += shell.exports(settings.env)
    lines += shell.array("MEGATRON_ARGS", tokens)
    lines.append('# torchrun ... pretrain_gpt.py "${MEGATRON_ARGS[@]}" "${DATA_ARGS[@]}"')
    return Exported(
        format="megatron-args",
        mcore=settings.mcore,
        text="\n".join(lines) + "\n",
        arguments=tuple(tokens),
        env=dict(settings.env),
        left_out=left_out,
    )


def _fields(settings: Settings) -> dict[str, Any]:
    """The candidate's fields over the architecture, and what the command line asks for besides."""
    architecture = _architecture(settings) if settings.model else {}
    fields = {**architecture, **settings.fields}
    precision = settings.precision
    if precision is None and settings.model and not _TYPES & fields.keys():
        precision = "bf16"  # as everywhere where a document with a model names none
    if precision in ("bf16", "fp16"):
        fields.setdefault(precision, True)
    if settings.model:
        positions = fields.get(_NEEDED_POSITIONS) or fields.get("seq_length")
        if isinstance(positions, int):
            length = fields.get("seq_length")
            fields[_NEEDED_POSITIONS] = max(positions, length if isinstance(length, int) else 0)
    return fields


def _architecture(settings: Settings) -> dict[str, Any]:
    """Architecture fields whose value the command line would not take by itself."""
    given = settings.model
    defaults = {f.name: f.default for f in dataclasses.fields(ModelSpec)}
    known = arguments(settings.mcore)
    found: dict[str, Any] = {}
    for name, default in defaults.items():
        value = given.get(name, default)
        if name == "name" or value in (None, dataclasses.MISSING) or _is_unread(name, given):
            continue
        options = known.get(RENAMED.get(name, name))
        if name in given or name == _TIED or (options and options[0].default != value):
            found[name] = value
    return found


_TYPES = frozenset(("bf16", "fp16", "params_dtype", "pipeline_dtype"))
_TIED = "share_embeddings_and_output_weights"
_MLA_ONLY = frozenset(
    (
        *("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"),
        *("rope_type", "rotary_scaling_factor", "original_max_position_embeddings"),
        *("beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
    )
)
_DERIVED_WITH_MLA = frozenset(("num_query_groups", "rotary_percent"))


def _is_unread(name: str, model: Any) -> bool:
    """Whether the architecture does not read the field, so that the line leaves it out."""
    latent = bool(model.get("multi_latent_attention"))
    if name in _MLA_ONLY:
        return not latent
    if latent and name in _DERIVED_WITH_MLA:
        return True
    if name.startswith("moe_"):
        return not model.get("num_moe_experts")
    if name.startswith("mamba_") or name == "is_hybrid_model":
        return not model.get("hybrid_layer_pattern")
    if name.startswith("linear_"):
        return not model.get("experimental_attention_variant")
    return False
