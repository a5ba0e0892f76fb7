"""A recipe's container made into the trial: candidate, own overrides, and a run of a few steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainables.errors import TrialSpecError
from trainables.megatron_core.graphs import steps_until_captured
from tuner.measurement import TrialSpec

_ARCHITECTURE = (
    *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "kv_channels"),
    *("num_query_groups", "num_moe_experts", "moe_router_topk", "moe_ffn_hidden_size"),
    *("multi_latent_attention", "q_lora_rank", "kv_lora_rank", "mtp_num_layers"),
)
"""Fields that must agree between the recipe and the job's model: the rules and estimates are of
the latter."""

_RUN: Mapping[str, Any] = {
    "train.train_samples": None,
    "train.num_epochs": None,
    "train.eval_iters": 0,
    "train.exit_interval": None,
    "validation.eval_iters": 0,
    "scheduler.lr_decay_style": "constant",
    "scheduler.lr_warmup_fraction": None,
    "scheduler.lr_warmup_iters": 0,
    "scheduler.lr_warmup_samples": 0,
    "scheduler.lr_decay_samples": None,
    "scheduler.lr_wsd_decay_iters": None,
    "scheduler.lr_wsd_decay_samples": None,
    "checkpoint.save": None,
    "checkpoint.load": None,
    "checkpoint.save_interval": None,
    "checkpoint.non_persistent_save_interval": None,
    "logger.log_interval": 1,
    "logger.log_throughput": True,
    "logger.tensorboard_dir": None,
    "logger.wandb_project": None,
    "logger.wandb_exp_name": None,
    "logger.mlflow_experiment": None,
    "logger.comet_project": None,
    "profiling": None,
    "straggler": None,
    "ft": None,
    "inprocess_restart": None,
    "nvrx_straggler": None,
}
"""What makes any recipe a short run that leaves nothing behind; releases have parts of it."""


def override_words(spec: TrialSpec, mcore: str) -> list[str]:
    """The candidate and the run's shape as override words, the job's own overrides last.

    Raises TrialSpecError for a field that Megatron Bridge has no place for.
    """
    from tuner.formats import export_document

    document = {
        "config": dict(spec.config),
        "seq_length": spec.seq_length,
        "global_batch_size": spec.global_batch_size,
    }
    exported = export_document(document, "bridge-cli", mcore=mcore)
    if exported.left_out:
        name, reason = next(iter(exported.left_out.items()))
        raise TrialSpecError(f"{name} cannot be set on a Megatron Bridge recipe: {reason}")
    return [*exported.arguments, *spec.options.get("overrides", ())]


def configure(container: Any, spec: TrialSpec, mcore: str) -> int:
    """Make `container` the trial, in place; the number of warm-up steps it needs.

    Raises TrialSpecError where the recipe is of another model or has no mock data, and whatever
    Bridge raises for an override it refuses.
    """
    from megatron.bridge.training.utils.omegaconf_utils import process_config_with_overrides

    process_config_with_overrides(container, cli_overrides=override_words(spec, mcore))
    _require_same_model(container.model, spec.model)
    _use_mock_data(container)
    graphs = {
        name: getattr(container.model, name)
        for name in ("cuda_graph_impl", "cuda_graph_warmup_steps")
        if getattr(container.model, name, None) is not None
    }
    warmup = max(spec.warmup_steps, 2, steps_until_captured(graphs))
    _shorten(container, warmup + spec.measure_steps)
    return warmup


def _shorten(container: Any, steps: int) -> None:
    run = {**_RUN, "train.train_iters": steps, "scheduler.lr_decay_iters": steps}
    for path, value in run.items():
        section, _, name = path.rpartition(".")
        holder = getattr(container, section, None) if section else container
        if holder is not None and hasattr(holder, name):
            setattr(holder, name, value)


def _require_same_model(built: Any, wanted: Mapping[str, Any]) -> None:
    for name in _ARCHITECTURE:
        ours, theirs = wanted.get(name), getattr(built, name, None)
        if ours is not None and theirs is not None and ours != theirs:
            raise TrialSpecError(
                f"the recipe has {name}={theirs}, the job's model {ours}: name the model of the "
                "recipe in the job, or set the difference in trainable.bridge.overrides"
            )


def _use_mock_data(container: Any) -> None:
    from megatron.bridge.training.config import GPTDatasetConfig

    dataset = container.dataset
    if not isinstance(dataset, GPTDatasetConfig):
        raise TrialSpecError(
            f"the recipe trains on {type(dataset).__name__}, for which there are no mock data: "
            "use a pretraining recipe"
        )
    for name in ("blend", "blend_per_split"):
        if hasattr(dataset, name):
            setattr(dataset, name, None)
