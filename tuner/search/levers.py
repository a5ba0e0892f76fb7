"""Changes of one configuration that trade memory for time, or time for memory.

Those that save memory are the steps of Megatron Bridge's memory guide: narrow recomputation, wider
ones, offload, the optimizer's state, then the layout. Those that cost memory undo them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from tuner.candidate import Candidate
from tuner.models import ModelSpec

SAVES, SPEEDS = "saves memory", "saves time"

_DENSE_MODULES = ("core_attn", "layernorm", "mlp")
_EXPERT_MODULES = ("moe_act", "shared_experts", "moe")
_OFFLOAD = (("core_attn",), ("attn_proj", "core_attn"), ("attn_norm", "mlp_norm"))
_EXPERT_OFFLOAD = (("moe_act",), ("expert_fc1", "moe_act"))
_NO_RECOMPUTE: Mapping[str, Any] = {
    "recompute_granularity": None,
    "recompute_method": None,
    "recompute_num_layers": None,
    "recompute_modules": None,
}
_SIZES = {
    "tensor_model_parallel_size": "tensor parallelism",
    "context_parallel_size": "context parallelism",
    "pipeline_model_parallel_size": "pipeline parallelism",
}


@dataclass(frozen=True, slots=True)
class Lever:
    """A change by name: fields with their new values (None takes a field away), and its aim."""

    name: str
    changes: Mapping[str, Any]
    aim: str = SAVES

    def applied(self, candidate: Candidate) -> Candidate:
        """The candidate after the change."""
        flat = {**candidate.to_flat(), **self.changes}
        if "env" in self.changes:
            flat["env"] = {**dict(candidate.env), **self.changes["env"]}
        return Candidate.from_flat({k: v for k, v in flat.items() if v is not None})

    def along_with(self, companions: Mapping[str, Any]) -> Lever:
        """The lever with further changes that it needs; variables of the environment add up."""
        changes = {**self.changes, **companions}
        if "env" in companions:
            changes["env"] = {**self.changes.get("env", {}), **companions["env"]}
        return replace(self, changes=changes)


def levers(candidate: Candidate, model: ModelSpec) -> list[Lever]:
    """Every lever that would change this candidate; whether rules allow it is not asked."""
    found = [
        *_recomputation(candidate, model),
        *_offload(candidate, model),
        *_optimizer(candidate),
        *_layout(candidate, model),
        *_graphs(candidate),
    ]
    return [lever for lever in found if lever.applied(candidate) != candidate]


def _recomputation(candidate: Candidate, model: ModelSpec) -> Iterator[Lever]:
    granularity = candidate.recompute_granularity
    own = candidate.recompute_modules if granularity == "selective" else ()
    modules = list(_DENSE_MODULES)
    if model.num_moe_experts is not None:
        modules[2:2] = _EXPERT_MODULES
    if model.multi_latent_attention:
        modules.insert(2, "mla_up_proj")
    if granularity != "full":
        for module in modules:
            if module not in own:
                yield Lever(
                    f"recompute {module}",
                    {
                        **_NO_RECOMPUTE,
                        "recompute_granularity": "selective",
                        "recompute_modules": [*own, module],
                    },
                )
    full = {**_NO_RECOMPUTE, "recompute_granularity": "full"}
    yield Lever(
        "recompute all layers", {**full, "recompute_method": "uniform", "recompute_num_layers": 1}
    )
    layers = model.num_layers // (
        candidate.pipeline_model_parallel_size
        * (candidate.virtual_pipeline_model_parallel_size or 1)
    )
    if layers > 1:
        yield Lever(
            "recompute half of the layers",
            {**full, "recompute_method": "block", "recompute_num_layers": layers // 2},
            SPEEDS if granularity == "full" else SAVES,
        )
    if granularity is not None:
        yield Lever("recompute nothing", _NO_RECOMPUTE, SPEEDS)
    if granularity == "selective" and len(own) > 1:
        for module in own:
            kept = [name for name in own if name != module]
            yield Lever(f"keep what {module} computed", {"recompute_modules": kept}, SPEEDS)


def _offload(candidate: Candidate, model: ModelSpec) -> Iterator[Lever]:
    choices = [*_OFFLOAD, *(_EXPERT_OFFLOAD if model.num_moe_experts is not None else ())]
    for modules in choices:
        yield Lever(
            f"offload {', '.join(modules)}",
            {
                "cpu_offloading": None,
                "cpu_offloading_num_layers": None,
                "fine_grained_activation_offloading": True,
                "offload_modules": list(modules),
            },
        )
    layers = model.num_layers
    for count in sorted({max(1, layers // 2), max(1, layers - 1)}):
        yield Lever(
            f"offload {count} layers",
            {
                "fine_grained_activation_offloading": None,
                "offload_modules": None,
                "cpu_offloading": True,
                "cpu_offloading_num_layers": count,
            },
        )
    if candidate.cpu_offloading or candidate.fine_grained_activation_offloading:
        names = ("cpu_offloading", "cpu_offloading_num_layers")
        more = ("fine_grained_activation_offloading", "offload_modules")
        yield Lever("offload nothing", dict.fromkeys((*names, *more)), SPEEDS)


def _optimizer(candidate: Candidate) -> Iterator[Lever]:
    yield Lever("distributed optimizer", {"use_distributed_optimizer": True})
    yield Lever("gradients in the parameters' precision", {"grad_reduce_in_fp32": False})
    yield Lever(
        "optimizer moments in BF16",
        {
            "use_precision_aware_optimizer": True,
            "exp_avg_dtype": "bf16",
            "exp_avg_sq_dtype": "bf16",
        },
    )
    flat = candidate.to_flat()
    if not flat.get("fp8") and flat.get("fp8_recipe", "delayed") != "delayed":  # see of_frontend
        yield Lever("main weights and gradients narrow, too", {"fp8_recipe": "delayed"})
    for fraction in (0.5, 1.0):
        yield Lever(
            f"{fraction:.0%} of the optimizer on the host",
            {
                "optimizer_cpu_offload": True,
                "optimizer_offload_fraction": fraction,
                "use_precision_aware_optimizer": True,
                "overlap_cpu_optimizer_d2h_h2d": True,
            },
        )
    if candidate.optimizer_cpu_offload:
        changes = dict.fromkeys(
            (
                "optimizer_cpu_offload",
                "optimizer_offload_fraction",
                "overlap_cpu_optimizer_d2h_h2d",
            )
        )
        yield Lever("the optimizer on the device", changes, SPEEDS)


def _layout(candidate: Candidate, model: ModelSpec) -> Iterator[Lever]:
    if candidate.micro_batch_size > 1:
        yield Lever("half the micro-batch", {"micro_batch_size": candidate.micro_batch_size // 2})
    yield Lever(
        "twice the micro-batch", {"micro_batch_size": 2 * candidate.micro_batch_size}, SPEEDS
    )
    sizes = dict(_SIZES)
    if model.num_moe_experts is not None:
        sizes["expert_model_parallel_size"] = "expert parallelism"
    for name, meaning in sizes.items():
        size = getattr(candidate, name)
        yield Lever(f"twice the {meaning}", _resized(candidate, name, 2 * size))
        if size > 1:
            yield Lever(f"half the {meaning}", _resized(candidate, name, size // 2), SPEEDS)
    if candidate.tensor_model_parallel_size > 1:
        yield Lever("sequence parallelism", {"sequence_parallel": True})
    chunks = candidate.virtual_pipeline_model_parallel_size or 1
    if candidate.pipeline_model_parallel_size > 1:
        name = "virtual_pipeline_model_parallel_size"
        if chunks > 1:
            yield Lever("no virtual stages", {name: None})
        yield Lever("twice the virtual stages", {name: 2 * chunks}, SPEEDS)


def _resized(candidate: Candidate, name: str, size: int) -> dict[str, Any]:
    """A parallel size changed, and with it what follows: without tensor parallelism there is no
    sequence parallelism, without a pipeline there are no virtual stages."""
    changes: dict[str, Any] = {name: size}
    if name == "tensor_model_parallel_size":
        changes["sequence_parallel"] = True if size > 1 else None
    if name == "pipeline_model_parallel_size" and candidate.virtual_pipeline_model_parallel_size:
        chunks = candidate.virtual_pipeline_model_parallel_size
        before = candidate.pipeline_model_parallel_size
        fewer = chunks * before // size
        changes["virtual_pipeline_model_parallel_size"] = fewer if size > 1 and fewer > 1 else None
    return changes


def _graphs(candidate: Candidate) -> Iterator[Lever]:
    fields = ("cuda_graph_impl", "cuda_graph_modules", "use_te_rng_tracker")
    if candidate.cuda_graph_impl != "none":
        yield Lever("no CUDA graphs", dict.fromkeys(fields))
        return
    yield Lever(
        "a CUDA graph of the step",
        {"cuda_graph_impl": "full_iteration", "use_te_rng_tracker": True},
        SPEEDS,
    )
