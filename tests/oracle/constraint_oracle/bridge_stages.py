"""Megatron Bridge in front of Megatron-Core: the real ConfigContainer, then the later stages.

``runtime_config_update`` applies the precision and overlap recipes and validates, exactly as a
training job does; ``provide`` of the model provider runs up to its last check. What Megatron Bridge
does not look at (layer split, process groups, schedule) is asked of Megatron-Core afterwards.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Mapping
from typing import Any

from constraint_oracle import groups, mcore_stages, stubs, values
from constraint_oracle.candidate import RUN_KEYS, Candidate, field_names

#: Imported by Megatron Bridge, never called while a configuration is validated.
STUBBED = (
    "transformers",
    "omegaconf",
    "hydra",
    "datasets",
    "regex",
    "modelopt",
    "diffusers",
    "webdataset",
    "megatron.energon",
    "nvidia_resiliency_ext",
    "wandb",
    "qwen_vl_utils",
    "safetensors",
    "huggingface_hub",
    "PIL",
    "torchvision",
    "sentencepiece",
    "tiktoken",
    "accelerate",
    "peft",
    "timm",
)

#: Keys of a candidate that belong to other parts of the container, or to no part of it.
CONTAINER_KEYS = RUN_KEYS - {"seq_length", "vocab_size", "decoupled_weight_decay"} | {
    "te_rng_tracker"
}

#: Packages whose ``__init__`` imports every supported model family; only providers are needed.
HOLLOW = {
    "megatron.bridge": {},
    "megatron.bridge.models": {
        "GPTModelProvider": "gpt_provider",
        "T5ModelProvider": "t5_provider",
    },
    "megatron.bridge.models.conversion": {},
    "megatron.bridge.models.hf_pretrained": {},
}


def prepare(world: groups.World) -> None:
    """Registers the hollow packages and lets Bridge ask the stand-in world for its size."""
    import importlib.util

    import megatron.core  # noqa: F401

    for name, owners in HOLLOW.items():
        if importlib.util.find_spec(name) is not None:
            stubs.hollow(name, owners)
    from megatron.bridge.training import comm_overlap, config

    for module in (config, comm_overlap):
        if hasattr(module, "get_world_size_safe"):
            module.get_world_size_safe = lambda: world.size
    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").startswith("megatron.bridge"):
            _silence(module)


def _silence(module: types.ModuleType) -> None:
    for name in ("print_rank_0", "warn_rank_0", "log_single_rank"):
        if name in vars(module):
            setattr(module, name, lambda *_, **__: None)


class BridgeCandidate(Candidate):
    """A candidate with the ConfigContainer made of it."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self.container: Any = None
        self.changed: dict[str, list[Any]] = {}

    def note_changes(self) -> None:
        """Remembers the fields changed so far, per part: ``{"model.field": [given, held]}``."""
        self.changed = {
            f"{part}.{name}": pair
            for part in ("model", "ddp", "optimizer")
            for name, pair in values.changes(self.config, getattr(self.container, part)).items()
        }

    def rewritten(self) -> dict[str, list[Any]]:
        return self.changed


#: What Megatron Bridge's training recipes set where a candidate says nothing.
RECIPE_DDP = {"average_in_collective": True, "grad_reduce_in_fp32": True}


def _checkpoint(given: Mapping[str, Any]) -> dict[str, Any]:
    """A job that names a format saves; one that does not keeps no checkpoint."""
    if "ckpt_format" not in given:
        return {}
    return {"save": "checkpoints", "ckpt_format": given["ckpt_format"]}


def _overrides(cls: type, config: Mapping[str, Any]) -> dict[str, Any]:
    names = field_names(cls)
    return {key: values.to_python(key, value) for key, value in config.items() if key in names}


def _given(config: Mapping[str, Any], **names: str) -> dict[str, Any]:
    """Arguments taken from the candidate under other names, left out when it does not set them."""
    return {name: config[key] for name, key in names.items() if key in config}


def _build_container(candidate: BridgeCandidate) -> Any:
    from megatron.bridge.models.gpt_provider import GPTModelProvider
    from megatron.bridge.training import config as parts
    from megatron.bridge.training.comm_overlap import CommOverlapConfig

    given = candidate.config
    model_class = GPTModelProvider
    if given.get("multi_latent_attention"):
        from megatron.bridge.models.mla_provider import MLAModelProvider

        model_class = MLAModelProvider
    ddp_class, optimizer_class = parts.DistributedDataParallelConfig, parts.OptimizerConfig
    known = CONTAINER_KEYS.union(
        *(field_names(one) for one in (model_class, ddp_class, optimizer_class))
    )
    for key in given:
        if key not in known:
            raise TypeError(f"no Bridge model/ddp/optimizer field {key!r}")
    overlap = None
    if given.get("comm_overlap") is not None:
        overlap = CommOverlapConfig(**given["comm_overlap"])
    return parts.ConfigContainer(
        model=model_class(**_overrides(model_class, given)),
        ddp=ddp_class(**RECIPE_DDP | _overrides(ddp_class, given)),
        optimizer=optimizer_class(**_overrides(optimizer_class, given)),
        train=parts.TrainingConfig(
            train_iters=100,
            **_given(
                given,
                micro_batch_size="micro_batch_size",
                global_batch_size="global_batch_size",
                decrease_batch_size_if_needed="decrease_batch_size_if_needed",
            ),
        ),
        scheduler=parts.SchedulerConfig(),
        dataset=_dataset(parts, given),
        logger=parts.LoggerConfig(),
        tokenizer=parts.TokenizerConfig(),
        checkpoint=parts.CheckpointConfig(**_checkpoint(given)),
        dist=parts.DistributedInitConfig(**_given(given, use_torch_fsdp2="use_torch_fsdp2")),
        rng=parts.RNGConfig(**_given(given, te_rng_tracker="te_rng_tracker")),
        rerun_state_machine=parts.RerunStateMachineConfig(
            **_given(given, check_for_nan_in_loss="check_for_nan_in_loss")
        ),
        comm_overlap=overlap,
        mixed_precision=given.get("mixed_precision"),
    )


def _dataset(parts: Any, given: Mapping[str, Any]) -> Any:
    """No dataset: its only check is that its sequence length is the model's."""
    del parts, given


def bridge(candidate: BridgeCandidate) -> None:
    from megatron.bridge.training.config import runtime_config_update

    candidate.container = _build_container(candidate)
    runtime_config_update(candidate.container)
    candidate.model = candidate.container.model
    candidate.ddp = candidate.container.ddp
    candidate.optimizer = candidate.container.optimizer
    candidate.note_changes()


class _PastTheChecksError(Exception):
    """Raised where ``provide`` begins to build the model."""


def bridge_provide(candidate: BridgeCandidate) -> None:
    """The checks of the provider's ``provide``, up to the choice of layers."""

    def stop(config: Any) -> Any:
        raise _PastTheChecksError

    model = candidate.model
    before = model.transformer_layer_spec
    model.transformer_layer_spec = stop
    try:
        model.provide(pre_process=True, post_process=True, vp_stage=0)
    except _PastTheChecksError:
        candidate.note_changes()
    finally:
        model.transformer_layer_spec = before


#: Settled by the container; its layers are always those of Transformer Engine.
SETTLED = ("transformer_config", "ddp_config", "optimizer_config", "attention_parts")

STAGES: tuple[Callable[[Any], None], ...] = (
    bridge,
    bridge_provide,
    *(stage for stage in mcore_stages.STAGES if stage.__name__ not in SETTLED),
)
