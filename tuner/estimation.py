"""`tuner estimate`: what a candidate needs, as one document.

Memory comes from a dry run of chosen ranks, replayed through PyTorch's allocator under the memory
of the GPU; time from the kernels of a dry run of single layers (`tuner.timing`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tuner.candidate import Candidate
from tuner.constraints.rules.layer_split import LayoutError, parse_layout
from tuner.errors import InputError
from tuner.hardware import Gpu, get_gpu
from tuner.memory.allocator_replay import AllocatorReplay, Fit, explain_fit
from tuner.memory.allocator_settings import AllocatorSettings
from tuner.memory.categories import activations_at, breakdown_at
from tuner.memory.fixed_costs import FixedCosts, fixed_costs
from tuner.models import MODEL_INPUTS, ModelSpec, ModelSpecError, get_model
from tuner.precision import expand_precision, of_frontend

if TYPE_CHECKING:
    from tuner.memory.trace import Trace

_RUN_FIELDS = ("world_size", "seq_length", "global_batch_size", "gpu", "gpus_per_node", "precision")
_TIMELINE_POINTS = 400

TraceOf = Callable[["EstimateRequest", int], "Trace"]
"""Gives the trace of a rank: the dry run, or a stand-in that has it already."""


@dataclass(frozen=True, slots=True)
class EstimateRequest:
    """What `tuner estimate` is asked: a model, a candidate, and the shape of the run."""

    model: ModelSpec
    candidate: Candidate
    world_size: int
    seq_length: int
    global_batch_size: int
    gpu: Gpu
    gpus_per_node: int
    precision: str = "bf16"
    te_version: str | None = None

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> EstimateRequest:
        """Read the input document; architecture fields and run shape in `config` win.

        Raises InputError naming the field that is missing, unknown or of the wrong kind.
        """
        config = document.get("config")
        if not isinstance(config, Mapping):
            raise InputError("must be a mapping of Megatron-Core fields", field="config")
        config = dict(config)
        run = {name: document[name] for name in _RUN_FIELDS if document.get(name) is not None}
        run |= {name: config.pop(name) for name in _RUN_FIELDS if config.get(name) is not None}
        architecture = {name: config.pop(name) for name in MODEL_INPUTS if name in config}
        gpu = get_gpu(_required(run, "gpu", "name one, e.g. h100"))
        precision, config = expand_precision(run.get("precision", "bf16"), config)
        candidate = Candidate.from_flat(of_frontend(document.get("frontend"), config))
        world_size = _size(run, "world_size")
        global_batch_size = _size(run, "global_batch_size")
        _check_shape(candidate, world_size, global_batch_size)
        return cls(
            model=_model(document.get("model"), architecture),
            candidate=candidate,
            world_size=world_size,
            seq_length=_size(run, "seq_length"),
            global_batch_size=global_batch_size,
            gpu=gpu,
            gpus_per_node=int(run.get("gpus_per_node") or gpu.gpus_per_node),
            precision=precision,
            te_version=document.get("te_version"),
        )


def _check_shape(candidate: Candidate, world_size: int, global_batch_size: int) -> None:
    """Raise InputError where ranks or sequences do not divide as Megatron-Core asks."""
    ranks = candidate.model_parallel_size()
    if world_size % ranks:
        raise InputError(
            f"{world_size} is not a multiple of the {ranks} ranks of one model replica "
            "(tensor x pipeline x context parallel)",
            field="world_size",
            fix=f"use a multiple of {ranks}",
        )
    tensor = candidate.expert_tensor_parallel_size or candidate.tensor_model_parallel_size
    experts = tensor * candidate.expert_model_parallel_size * candidate.pipeline_model_parallel_size
    if world_size % experts:
        raise InputError(
            f"{world_size} is not a multiple of the {experts} ranks of one replica of the experts "
            "(expert tensor x expert x pipeline parallel)",
            field="world_size",
            fix=f"use a multiple of {experts}",
        )
    step = candidate.micro_batch_size * (world_size // ranks)
    if global_batch_size % step:
        raise InputError(
            f"{global_batch_size} is not a multiple of micro_batch_size x data-parallel ranks, "
            f"{step}",
            field="global_batch_size",
            fix=f"use a multiple of {step}",
        )


def estimate(
    document: Mapping[str, Any],
    *,
    ranks: Sequence[int] | None = None,
    trace_of: TraceOf | None = None,
) -> dict[str, Any]:
    """The document `tuner estimate --method dryrun` prints for one input document.

    `ranks` limits the dry run to these global ranks; by default the ranks that can hold the peak
    (`peak_ranks`). Raises InputError for unusable input.
    """
    from tuner.timing.estimate import time_fields

    request = EstimateRequest.from_document(document)
    chosen = list(ranks) if ranks is not None else peak_ranks(request)
    source = trace_of or dry_run_trace
    found = [estimate_rank(request, rank, source(request, rank)) for rank in chosen]
    worst = max(found, key=lambda rank: (not rank.fit.fits, rank.replay.peak_reserved_bytes))
    return {
        "fits": all(rank.fit.fits for rank in found),
        "peak_allocated_bytes": max(rank.replay.peak_allocated_bytes for rank in found),
        "peak_reserved_bytes": max(rank.replay.peak_reserved_bytes for rank in found),
        "ranks": [rank.to_json() for rank in found],
        **time_fields(request),
        "memory_fit": worst.fit.to_json(),
        "fixed_costs": worst.fixed.to_json(),
        "assumptions": assumptions(request),
    }


@dataclass(frozen=True, slots=True)
class RankEstimate:
    """One rank: its allocations replayed without a limit, and under the device's memory."""

    rank: int
    stage: int
    trace: Trace
    replay: AllocatorReplay
    fit: Fit
    fixed: FixedCosts

    def to_json(self) -> dict[str, Any]:
        return {
            "rank": self.rank,
            "stage": self.stage,
            "allocated_bytes": self.replay.peak_allocated_bytes,
            "reserved_bytes": self.replay.peak_reserved_bytes,
            "static_bytes": static_bytes(self.trace, self.replay),
            "fragmentation": self.replay.fragmentation,
            "breakdown": dict(breakdown_at(self.trace, peak_event(self.replay))),
            "activations": dict(activations_at(self.trace, peak_event(self.replay))),
            "timeline": timeline(self.trace, self.replay),
        }


def estimate_rank(request: EstimateRequest, rank: int, trace: Trace) -> RankEstimate:
    """Replay the trace of one rank, without a limit and under the memory of the GPU."""
    from tuner.memory.allocator_replay import replay

    candidate = request.candidate
    fixed = rank_fixed_costs(request)
    settings = AllocatorSettings.from_environment(dict(candidate.env))
    capacity = request.gpu.usable_memory_bytes - fixed.total_bytes
    return RankEstimate(
        rank=rank,
        stage=rank // (request.world_size // candidate.pipeline_model_parallel_size),
        trace=trace,
        replay=replay(trace, settings),
        fit=explain_fit(trace, capacity_bytes=capacity, settings=settings),
        fixed=fixed,
    )


def rank_fixed_costs(request: EstimateRequest) -> FixedCosts:
    """What a rank's device lacks for PyTorch's allocator."""
    model, candidate = request.model, request.candidate
    tokens = request.seq_length * candidate.micro_batch_size // candidate.context_parallel_size
    return fixed_costs(
        candidate,
        gpu=request.gpu,
        world_size=request.world_size,
        moe=model.num_moe_experts is not None,
        hidden_bytes=2 * tokens * model.hidden_size,
        hidden_size=model.moe_latent_size or model.hidden_size,
        experts=model.num_moe_experts or 0,
    )


def peak_ranks(request: EstimateRequest) -> list[int]:
    """One rank of each pipeline stage that can hold the peak, and the last rank of all.

    Stages between the second and the last hold fewer micro-batches than the second and the same
    layers, so they are left out where every stage has as many layers. Where a part of the optimizer
    is on the host, whole parameters go in their order, and ranks of one stage differ in what that
    leaves on the device: the last stage's first rank and the one in its middle are taken in too.
    """
    stages = request.candidate.pipeline_model_parallel_size
    per_stage = max(1, request.world_size // stages)
    uneven = any(name in _UNEVEN for name, value in request.candidate.extra if value)
    even = (
        not uneven and request.model.num_layers % stages == 0 and not request.model.num_moe_experts
    )
    chosen = {0, 1, stages - 1} if even else set(range(stages))
    firsts = [stage * per_stage for stage in sorted(chosen) if 0 <= stage < stages - 1]
    last = request.world_size - per_stage
    if request.candidate.splits_optimizer:
        firsts += [last, last + per_stage // 2]
    return sorted({*firsts, request.world_size - 1})


_UNEVEN = (
    "pipeline_model_parallel_layout",
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)


def run_batch_size(request: EstimateRequest) -> int:
    """Sequences of a step that holds as much memory as the whole global batch.

    A pipeline rank holds its largest number of micro-batches once the first forward passes are
    through: after one round of a pipeline without chunks, within three of an interleaved one. Four
    micro-batches more are past the first accumulation of gradients. Where the gradient of the
    output layer's weight is deferred, tensors pile up until the limit or the last micro-batch.
    """
    candidate = request.candidate
    extra = dict(candidate.extra)
    group = extra.get("microbatch_group_size_per_vp_stage") or 1
    replicas = max(1, request.world_size // max(1, candidate.model_parallel_size()))
    step = candidate.micro_batch_size * replicas
    round_size = max(candidate.pipeline_model_parallel_size, group)
    rounds = 4
    if candidate.pipeline_model_parallel_size > 1:
        rounds += candidate.pipeline_model_parallel_size
    if _has_chunks(candidate):
        rounds = max(4, 3 * round_size)
    if extra.get("defer_embedding_wgrad_compute"):
        limit = extra.get("wgrad_deferral_limit") or 0
        rounds = max(rounds, limit + round_size) if limit else request.global_batch_size
    if _has_chunks(candidate):  # whose schedule takes whole rounds
        rounds += -rounds % round_size
    return min(request.global_batch_size, step * rounds)


def _has_chunks(candidate: Candidate) -> bool:
    """Whether ranks hold several model chunks, or may."""
    layout = dict(candidate.extra).get("pipeline_model_parallel_layout")
    if not layout:
        return bool(candidate.virtual_pipeline_model_parallel_size)
    try:
        return len(parse_layout(layout)) != candidate.pipeline_model_parallel_size
    except LayoutError:
        return True


def dry_run_trace(request: EstimateRequest, rank: int) -> Trace:
    """The trace of a dry run of real Megatron-Core."""
    from tuner.memory import dry_run

    options: dict[str, Any] = {"te_version": request.te_version} if request.te_version else {}
    return dry_run(
        request.model,
        request.candidate,
        world_size=request.world_size,
        seq_length=request.seq_length,
        global_batch_size=run_batch_size(request),
        precision=request.precision,
        rank=rank,
        architecture=request.gpu.architecture,
        **options,
    ).trace


def peak_event(run: AllocatorReplay) -> int:
    """The event after which most bytes were allocated; the first of several."""
    return int(run.allocated_bytes.argmax()) if len(run.allocated_bytes) else 0


def static_bytes(trace: Trace, run: AllocatorReplay) -> int | None:
    """Bytes that stay allocated after the last optimizer step of the trace."""
    ends = [event for event, name in trace.markers if name.endswith("end")]
    if not ends or not 0 < ends[-1] <= len(run.allocated_bytes):
        return None
    return int(run.allocated_bytes[ends[-1] - 1])


def timeline(trace: Trace, run: AllocatorReplay, points: int = _TIMELINE_POINTS) -> dict[str, Any]:
    """Allocated and reserved bytes over the events: the highest value of each stretch."""
    import numpy as np

    count = len(run.allocated_bytes)
    edges = np.unique(np.linspace(0, count, num=min(points, count) + 1).astype(int))
    starts = edges[:-1]
    if not len(starts):
        return {"event": [], "allocated_bytes": [], "reserved_bytes": [], "markers": []}
    return {
        "event": starts.tolist(),
        "allocated_bytes": np.maximum.reduceat(run.allocated_bytes, starts).tolist(),
        "reserved_bytes": np.maximum.reduceat(run.reserved_bytes, starts).tolist(),
        "markers": [[int(event), name] for event, name in trace.markers],
    }


def assumptions(request: EstimateRequest) -> dict[str, Any]:
    """Versions and figures the estimate rests on."""
    from importlib.metadata import version

    return {
        "megatron_core": version("megatron-core"),
        "global_batch_size_run": run_batch_size(request),
        "gpu": request.gpu.name,
        "usable_memory_bytes": request.gpu.usable_memory_bytes,
    }


def _model(model: object, architecture: Mapping[str, Any]) -> ModelSpec:
    """The model by name or fields, with the architecture fields of the config over it."""
    if model is not None and not isinstance(model, (str, Mapping)):
        raise InputError(f"{model!r} must be a name or a mapping of fields", field="model")
    if model is None and not architecture:
        raise InputError("is missing", field="model", fix="name a model or give its fields")
    try:
        if model is None:
            return ModelSpec.from_flat(architecture)
        spec = get_model(model)
        if not architecture:
            return spec
        return ModelSpec.from_flat(spec.to_flat() | dict(architecture), name=spec.name)
    except ModelSpecError as error:
        raise InputError(str(error)) from error


def _required(run: Mapping[str, Any], name: str, fix: str) -> Any:
    if run.get(name) is None:
        raise InputError("is missing", field=name, fix=fix)
    return run[name]


def _size(run: Mapping[str, Any], name: str) -> int:
    value = _required(run, name, "set it to a positive integer")
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InputError(f"{value!r} must be a positive integer", field=name)
    return value
