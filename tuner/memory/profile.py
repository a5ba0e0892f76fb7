"""Profiles: what one unit of a model adds to memory, measured by a dry run of a few layers.

A model is a row of units: the embedding, decoder layers of a few kinds, and the head (final norm,
output layer, loss, multi-token prediction). For one setting of everything but the pipeline, each
unit's bytes are measured once and kept on disk; `compose` puts them together again for any
pipeline.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tuner.candidate import Candidate
from tuner.memory import boundaries
from tuner.memory.categories import (
    CATEGORIES,
    CUBLAS_WORKSPACE,
    GRADIENTS,
    OPTIMIZER_STATE,
    WEIGHTS,
)
from tuner.memory.dryrun import BLOCK_BYTES
from tuner.memory.errors import UnsupportedError
from tuner.memory.request import DryRunRequest
from tuner.memory.trace import Trace, step_end, step_start
from tuner.models import ModelSpec

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

EMBEDDING, DENSE, EXPERTS, HEAD = "embedding", "dense", "experts", "head"

_FORMAT = 1
"""Part of every key: profiles written by other code are not read."""


@dataclass(frozen=True, slots=True)
class UnitProfile:
    """Bytes of one unit for one micro-batch, and its parameters on one rank.

    `retained` stays after the unit's forward pass; `forward_peak` is the most it adds while it
    runs. `backward_peak` is the most that is added while its backward pass runs; when that has
    ended, `retained` is free again.
    """

    retained: int
    forward_peak: int
    backward_peak: int
    dense_parameters: int
    expert_parameters: int


@dataclass(frozen=True, slots=True)
class StepProfile:
    """The units of a model under one setting, and what the optimizer adds for each parameter.

    `hidden_bytes` is the size of the tensor passed between units. `placeholders` holds, by unit,
    the bytes of what it shares with other units of the rank: placeholder gradients of its weights,
    by shape, and the workspace of PyTorch's matrix products. `constant_bytes` is what else stays
    on the device besides parameters, gradients and optimizer state.
    """

    units: Mapping[str, UnitProfile]
    hidden_bytes: int
    placeholders: Mapping[str, Mapping[str, int]]
    constant_bytes: int
    weight_bytes_per_parameter: float
    gradient_bytes_per_parameter: float
    state_bytes_per_parameter: float
    versions: Mapping[str, str]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> StepProfile:
        units = {name: UnitProfile(**unit) for name, unit in data["units"].items()}
        return cls(**{**data, "units": units})


_PIPELINE_FIELDS = (
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "pipeline_model_parallel_layout",
    "microbatch_group_size_per_vp_stage",
    "overlap_p2p_comm",
    "batch_p2p_comm",
    "recompute_num_layers",
    "optimizer_cpu_offload",
    "optimizer_offload_fraction",
)
"""Fields that `compose` accounts for itself."""

_UNCOMPOSED = {
    "cpu_offloading": "activation offload by layers",
    "fine_grained_activation_offloading": "activation offload by modules",
    "optimizer_cpu_offload": "optimizer offload",
    "overlap_moe_expert_parallel_comm": "overlap of expert-parallel communication",
    "pipeline_model_parallel_layout": "a pipeline layout",
    "microbatch_group_size_per_vp_stage": "a micro-batch group size",
}


def check_composable(candidate: Candidate) -> None:
    """Raise UnsupportedError where only a full dry run of the candidate says what it needs."""
    flat = candidate.to_flat()
    for name, meaning in _UNCOMPOSED.items():
        if flat.get(name):
            raise UnsupportedError(
                f"{meaning} is not composed from profiles", field=name, fix="use a full dry run"
            )
    if candidate.cuda_graph_impl != "none":
        raise UnsupportedError(
            "CUDA graphs are not composed from profiles", field="cuda_graph_impl"
        )


def profile_request(
    model: ModelSpec, candidate: Candidate, *, seq_length: int, precision: str = "bf16", **run: Any
) -> DryRunRequest:
    """The dry run that profiles `candidate`: one replica, no pipeline, two layers of each kind."""
    flat = candidate.to_flat()
    environment = flat.pop("env", {})
    for name in _PIPELINE_FIELDS:
        flat.pop(name, None)
    if flat.get("recompute_granularity") == "full":
        flat |= {"recompute_method": "uniform", "recompute_num_layers": 1}
    kinds = sorted(set(model.moe_layer_pattern))
    architecture = model.to_flat()
    architecture["num_layers"] = 2 * len(kinds)
    if model.num_moe_experts is not None:
        architecture["moe_layer_freq"] = [int(kind) for kind in kinds for _ in range(2)]
    if isinstance(architecture.get("window_attn_skip_freq"), list):
        raise UnsupportedError(
            "a list of windowed layers is not profiled", field="window_attn_skip_freq"
        )
    return DryRunRequest(
        model=architecture,
        config=flat,
        world_size=profile_world_size(candidate),
        seq_length=seq_length,
        global_batch_size=2 * candidate.micro_batch_size * _data_ranks(candidate),
        rank=0,
        precision=precision,
        environment=environment,
        boundaries=True,
        **run,
    )


def profile_world_size(candidate: Candidate) -> int:
    """Fewest ranks that hold one replica of the experts and of the rest."""
    etp = candidate.expert_tensor_parallel_size or candidate.tensor_model_parallel_size
    dense = candidate.tensor_model_parallel_size * candidate.context_parallel_size
    experts = etp * candidate.expert_model_parallel_size
    largest, smallest = max(dense, experts), min(dense, experts)
    if largest % smallest:
        raise UnsupportedError(
            f"{experts} expert ranks and {dense} dense ranks have no common replica",
            field="expert_model_parallel_size",
        )
    return largest


def _data_ranks(candidate: Candidate) -> int:
    dense = candidate.tensor_model_parallel_size * candidate.context_parallel_size
    return profile_world_size(candidate) // dense


def profile_key(request: DryRunRequest, versions: Sequence[str]) -> str:
    """Name of a profile: equal requests under equal software have equal names."""
    document = [request.to_json(), list(versions), _FORMAT]
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()[:32]


def cache_folder() -> Path:
    """Where profiles are kept: `MEGATRON_TUNER_CACHE`, else below the user's cache folder."""
    own = os.environ.get("MEGATRON_TUNER_CACHE")
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(own) if own else Path(base) / "megatron-tuner" / "profiles"


def profiles_of(
    requests: Sequence[DryRunRequest], *, mcore: Path | None = None, workers: int = 1
) -> list[StepProfile]:
    """The profile of each request: read from disk where it is there, measured otherwise.

    Equal requests are measured once; `workers` of them at a time.
    """
    from tuner.measurement import write_json_atomically

    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    versions = _software_versions(mcore)
    keys = [profile_key(request, versions) for request in requests]
    found: dict[str, StepProfile] = {}
    missing: dict[str, DryRunRequest] = {}
    for key, request in zip(keys, requests, strict=True):
        path = folder / f"{key}.json"
        if path.exists():
            found[key] = StepProfile.from_json(json.loads(path.read_text()))
        elif key not in missing:
            missing[key] = request

    def measure(item: tuple[str, DryRunRequest]) -> tuple[str, StepProfile]:
        key, request = item
        profile = measure_profile(request, mcore=mcore)
        write_json_atomically(folder / f"{key}.json", profile.to_json())
        return key, profile

    if missing:
        with ThreadPoolExecutor(max_workers=workers) as pool:
            found.update(pool.map(measure, missing.items()))
    return [found[key] for key in keys]


def _software_versions(mcore: Path | None) -> list[str]:
    from importlib import metadata

    return [metadata.version("megatron-core"), metadata.version("torch"), str(mcore or "")]


def measure_profile(request: DryRunRequest, *, mcore: Path | None = None) -> StepProfile:
    """Make the dry run of a `profile_request` and read the units off its trace."""
    from tuner.memory.worker_pool import record

    trace, stated = record(request, mcore)
    parameters = json.loads(stated.pop("parameters"))
    placeholders = json.loads(stated.pop("placeholders"))
    return read_profile(trace, request, parameters, placeholders, stated)


def read_profile(
    trace: Trace,
    request: DryRunRequest,
    parameters: Mapping[str, Sequence[int]],
    placeholders: Mapping[str, Mapping[str, int]],
    versions: Mapping[str, str],
) -> StepProfile:
    """The profile in a trace with boundaries.

    `parameters` counts each unit's parameters, dense and expert; `placeholders` is as in
    `StepProfile`. Both are by unit, layers by number.
    """
    windows = _Windows(trace, request.steps)
    layers = int(request.model["num_layers"])
    kinds = request.model.get("moe_layer_freq", [0] * layers)
    if not isinstance(kinds, Sequence) or request.model.get("num_moe_experts") is None:
        kinds = [0] * layers
    units = {
        EMBEDDING: windows.unit(
            boundaries.FORWARD_START,
            boundaries.layer_forward_start(0),
            boundaries.layer_backward_end(0),
            boundaries.BACKWARD_END,
            parameters[EMBEDDING],
        ),
        HEAD: windows.unit(
            boundaries.layer_forward_end(layers - 1),
            boundaries.FORWARD_END,
            boundaries.BACKWARD_START,
            boundaries.HEAD_BACKWARD_END,
            parameters[HEAD],
        ),
    }
    shared = {unit: placeholders.get(unit, {}) for unit in (EMBEDDING, HEAD)}
    for layer in range(1, layers, 2):  # the second of each kind: the first meets other neighbours
        after = layer + 1
        kind = EXPERTS if kinds[layer] else DENSE
        shared[kind] = placeholders.get(f"layer {layer}", {})
        units[kind] = windows.unit(
            boundaries.layer_forward_start(layer),
            boundaries.layer_forward_end(layer),
            boundaries.HEAD_BACKWARD_END
            if after == layers
            else boundaries.layer_backward_end(after),
            boundaries.layer_backward_end(layer),
            parameters[f"layer {layer}"],
        )
    for unit in {HEAD, EXPERTS} & set(shared):  # PyTorch's own products: output layer and router
        shared[unit] = {**shared[unit], CUBLAS_WORKSPACE: _kept_by(trace, CUBLAS_WORKSPACE)}
    total = sum(sum(counts) for counts in parameters.values())
    held = _held(trace)
    named = held[WEIGHTS] + held[GRADIENTS] + held[OPTIMIZER_STATE]
    return StepProfile(
        units=units,
        hidden_bytes=_hidden_bytes(request),
        placeholders=shared,
        constant_bytes=windows.final_bytes - named - placeholder_bytes(shared, shared),
        weight_bytes_per_parameter=held[WEIGHTS] / total,
        gradient_bytes_per_parameter=held[GRADIENTS] / total,
        state_bytes_per_parameter=held[OPTIMIZER_STATE] / total,
        versions=versions,
    )


def placeholder_bytes(placeholders: Mapping[str, Mapping[str, int]], units: Iterable[str]) -> int:
    """Bytes of the placeholder gradients of these units, equal shapes counted once."""
    together: dict[str, int] = {}
    for unit in units:
        together.update(placeholders.get(unit, {}))
    return sum(together.values())


def _held(trace: Trace) -> dict[str, int]:
    """Bytes by category that stay after the last event."""
    import numpy as np

    alive = trace.alive_at(len(trace) - 1)
    sums = np.bincount(trace.category[alive], weights=trace.bytes[alive], minlength=len(CATEGORIES))
    return {name: int(total) for name, total in zip(CATEGORIES, sums, strict=True)}


def _kept_by(trace: Trace, module: str) -> int:
    """Bytes of a module that stay after the last event."""
    if module not in trace.module_names:
        return 0
    alive = trace.alive_at(len(trace) - 1)
    mine = trace.module[alive] == trace.module_names.index(module)
    return int(trace.bytes[alive][mine].sum())


def _hidden_bytes(request: DryRunRequest) -> int:
    config = request.config
    tokens = request.seq_length * int(config.get("micro_batch_size", 1))
    tokens //= int(config.get("context_parallel_size") or 1)
    if config.get("sequence_parallel"):
        tokens //= int(config.get("tensor_model_parallel_size") or 1)
    width = 4 if request.precision == "fp32" else 2
    return tokens * int(request.model["hidden_size"]) * width


class _Windows:
    """Live bytes between the markers of the last micro-batch of the last step."""

    def __init__(self, trace: Trace, steps: int) -> None:
        live = trace.live_bytes(BLOCK_BYTES)
        self._live: NDArray[np.int64] = live
        start, end = trace.marker(step_start(steps)), trace.marker(step_end(steps))
        self.final_bytes = int(live[end - 1])
        self._markers: dict[str, int] = {}
        for event, name in trace.markers:
            if start <= event <= end:
                self._markers[name] = event  # the last of each name stays

    def unit(
        self, forward: str, forward_end: str, backward: str, backward_end: str, counts: Any
    ) -> UnitProfile:
        retained, forward_peak = self._window(forward, forward_end)
        _, backward_peak = self._window(backward, backward_end)
        return UnitProfile(retained, forward_peak, backward_peak, int(counts[0]), int(counts[1]))

    def _window(self, start: str, end: str) -> tuple[int, int]:
        """Change of live bytes over a window, and the most that was added in it."""
        first, last = self._markers[start], self._markers[end]
        before = int(self._live[first - 1])
        if last <= first:
            return 0, 0
        inside = self._live[first:last]
        return int(inside[-1]) - before, max(0, int(inside.max()) - before)


def without_recompute(candidate: Candidate) -> Candidate:
    """The same candidate keeping everything for backward."""
    return replace(
        candidate,
        recompute_granularity=None,
        recompute_method=None,
        recompute_num_layers=None,
        recompute_modules=(),
        distribute_saved_activations=False,
    )
