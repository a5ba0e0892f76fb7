"""Kernels of the units of a model: embedding, each kind of layer, multi-token prediction, head.

A dry run of one layer of each kind, one replica and no pipeline, has every kernel that any
pipeline repeats. Settings that change when kernels are launched, or where tensors lie between
passes, but not what is computed (graphs, offload, overlap, sharding of state) are left out of it:
their cost is added by the models of this package.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from tuner.candidate import Candidate
from tuner.memory import markers
from tuner.memory.kernel_log import GROUPS, OPERATION, KernelLog, concatenated
from tuner.memory.request import DryRunRequest
from tuner.memory.trace import Trace, step_end, step_start
from tuner.models import ModelSpec

EMBEDDING, MTP, HEAD = "embedding", "mtp", "head"

_FORMAT = 6
"""Part of every cache key: kernels written by other code are not read."""

SCOPES = ("other", "attn", "mlp", "mamba", "moe", "moe_router", "moe_preprocess")
"""Parts of a layer that CUDA graphs may capture, by the names of `cuda_graph_modules`."""

_SCOPE = {name: code for code, name in enumerate(SCOPES)}


@dataclass(frozen=True, slots=True)
class UnitKernels:
    """Operations of one unit for one micro-batch, and its parameters on one rank.

    `scope` gives, for each forward operation, the code in `SCOPES` of the part of the layer it
    belongs to. `recomputed` marks the backward operations that repeat forward work.
    """

    forward: KernelLog
    backward: KernelLog
    scope: Any
    recomputed: Any
    dense_parameters: int
    expert_parameters: int


@dataclass(frozen=True, slots=True)
class ModelKernels:
    """The units of a model under one setting, and what passes between them.

    `kinds` names the unit of each decoder layer of the whole model. `hidden_bytes` is the size of
    the tensor that one stage sends to the next. `optimizer_bytes_per_parameter` are moved in
    device memory by the optimizer step for each parameter a rank updates, `step_bytes` for each
    parameter a rank holds (gradients zeroed, scaled and measured).
    """

    units: Mapping[str, UnitKernels]
    kinds: tuple[str, ...]
    hidden_bytes: float
    optimizer_bytes_per_parameter: float
    step_bytes_per_parameter: float


_NEUTRAL = {
    # fields that do not change which kernels one replica without a pipeline runs
    "pipeline_model_parallel_size": None,
    "virtual_pipeline_model_parallel_size": None,
    "pipeline_model_parallel_layout": None,
    "account_for_embedding_in_pipeline_split": None,
    "account_for_loss_in_pipeline_split": None,
    "num_layers_in_first_pipeline_stage": None,
    "num_layers_in_last_pipeline_stage": None,
    "microbatch_group_size_per_vp_stage": None,
    "overlap_p2p_comm": None,
    "batch_p2p_comm": None,
    "cuda_graph_impl": None,
    "cuda_graph_modules": None,
    "cuda_graph_scope": None,
    "cpu_offloading": None,
    "cpu_offloading_num_layers": None,
    "fine_grained_activation_offloading": None,
    "offload_modules": None,
    "optimizer_cpu_offload": None,
    "optimizer_offload_fraction": None,
    "optimizer": "adam",
    "overlap_cpu_optimizer_d2h_h2d": None,
    "tp_comm_overlap": None,
    "fp8_param_gather": None,
    "fp8_param": None,
    "fp4_param": None,
    "reuse_grad_buf_for_mxfp8_param_ag": None,
    "first_last_layers_bf16": None,
    "num_layers_at_start_in_bf16": None,
    "num_layers_at_end_in_bf16": None,
    "use_megatron_fsdp": None,
    "use_torch_fsdp2": None,
    "data_parallel_sharding_strategy": None,
    "overlap_moe_expert_parallel_comm": None,
    "delay_wgrad_compute": None,
    "defer_embedding_wgrad_compute": None,
    "wgrad_deferral_limit": None,
    "moe_shared_expert_overlap": None,
    "overlap_grad_reduce": None,
    "overlap_param_gather": None,
    "align_param_gather": None,
    "overlap_param_gather_with_optimizer_step": None,
    "nccl_ub": None,
    "fsdp_double_buffer": None,
    "moe_token_dispatcher_type": "alltoall",
    "moe_flex_dispatcher_backend": None,
    "moe_deepep_num_sms": None,
    "moe_hybridep_num_sms": None,
    "moe_router_force_load_balancing": None,
    "num_distributed_optimizer_instances": None,
    "fp8_dot_product_attention": None,
    "fp8_multi_head_attention": None,
}


def kernel_request(
    model: ModelSpec, candidate: Candidate, *, seq_length: int, precision: str, **run: Any
) -> DryRunRequest:
    """The dry run whose trace has the units of `candidate`; equal for all that share them."""
    flat = candidate.to_flat()
    environment = {k: v for k, v in flat.pop("env", {}).items() if k in _KERNEL_ENVIRONMENT}
    dispatcher = flat.get("moe_token_dispatcher_type")
    for name, neutral in _NEUTRAL.items():
        present = flat.pop(name, None) is not None
        if neutral is not None and (present or model.num_moe_experts):
            flat[name] = neutral
    if dispatcher == "allgather":
        flat["moe_token_dispatcher_type"] = dispatcher
    flat["use_distributed_optimizer"] = True
    flat = {name: value for name, value in flat.items() if name in installed_fields()}
    if flat.get("recompute_granularity") == "full":
        flat |= {"recompute_method": "uniform", "recompute_num_layers": 1}
    architecture, _ = reduced_model(model)
    return DryRunRequest(
        model=architecture,
        config=flat,
        world_size=_world_size(candidate),
        seq_length=seq_length,
        global_batch_size=2 * candidate.micro_batch_size * _data_ranks(candidate),
        rank=0,
        precision=precision,
        environment=environment,
        boundaries=True,
        **run,
    )


@lru_cache(maxsize=1)
def installed_fields() -> frozenset[str]:
    """Fields of a candidate or of the installed Megatron-Core; others come from other versions."""
    from importlib.metadata import version

    from tuner.constraints.fields import catalogue

    minor = ".".join(version("megatron-core").split(".")[:2])
    known = {
        name
        for name, field in catalogue().items()
        if any(version.startswith(minor) for version in field.default)
    }
    return frozenset(known | {field.name for field in fields(Candidate)})


_KERNEL_ENVIRONMENT = (
    "NVTE_FLASH_ATTN",
    "NVTE_FUSED_ATTN",
    "NVTE_UNFUSED_ATTN",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO",
)


def layer_kinds(model: ModelSpec) -> tuple[str, ...]:
    """The unit that each decoder layer is: its letter in a hybrid pattern, or what it computes."""
    pattern = getattr(model, "hybrid_layer_pattern", None)
    if pattern:
        from tuner.models.hybrid import parse_pattern

        return tuple(f"hybrid {letter}" for letter in parse_pattern(pattern).decoder)
    windows = model.window_layer_pattern[: model.num_layers]
    return tuple(
        ("experts" if moe else "dense") + (" windowed" if windowed else "")
        for moe, windowed in zip(model.moe_layer_pattern, windows, strict=True)
    )


def reduced_model(model: ModelSpec) -> tuple[dict[str, Any], list[str]]:
    """The architecture with one layer of each kind, and the kind of each of its layers."""
    kinds = layer_kinds(model)
    layers = sorted(set(kinds))
    flat = model.to_flat()
    if flat.get("position_embedding_type") == "yarn":
        flat["position_embedding_type"] = "rope"  # other frequencies, the same kernels
    pattern = flat.get("hybrid_layer_pattern")
    if pattern:
        flat["hybrid_layer_pattern"] = "".join(kind.split()[1] for kind in layers)
        flat.pop("mtp_num_layers", None)
        return flat | {"num_layers": len(layers)}, layers
    flat["num_layers"] = len(layers)
    if model.num_moe_experts is not None:
        flat["moe_layer_freq"] = [int(kind.startswith("experts")) for kind in layers]
    if any(kind.endswith("windowed") for kind in layers):
        flat["window_attn_skip_freq"] = [int(kind.endswith("windowed")) for kind in layers]
    return flat, layers


def model_kernels(
    model: ModelSpec,
    candidate: Candidate,
    *,
    seq_length: int,
    precision: str,
    architecture: str = "hopper",
    **run: Any,
) -> ModelKernels:
    """The kernels of a candidate's units, from the cache or a dry run of under two seconds.

    `run` are further fields of `DryRunRequest`. Raises UnsupportedError or InputError as dry runs
    do.
    """
    request = kernel_request(
        model,
        candidate,
        seq_length=seq_length,
        precision=precision,
        architecture=architecture,
        **run,
    )
    return _of_model(_Key(request), layer_kinds(model), _predicted(model))


@lru_cache(maxsize=4096)
def _of_model(key: _Key, kinds: tuple[str, ...], predicted: tuple[str, ...]) -> ModelKernels:
    """The kernels of a request for a model whose layers are `kinds` and, predicting, `predicted`.

    A hybrid model's prediction layers are layers of its own kinds and one more output layer.
    """
    found = _kernels_of(key)
    units = dict(found.units)
    if predicted:
        units[MTP] = _joined([units[name] for name in predicted] + [units[HEAD]])
    return replace(found, units=units, kinds=kinds)


def _predicted(model: ModelSpec) -> tuple[str, ...]:
    """The kinds of the prediction layers of a hybrid model."""
    pattern = getattr(model, "hybrid_layer_pattern", None)
    if not pattern:
        return ()
    from tuner.models.hybrid import parse_pattern

    parsed = parse_pattern(pattern)
    return tuple(f"hybrid {letter}" for letter in parsed.prediction * parsed.depths)


def _joined(units: Sequence[UnitKernels]) -> UnitKernels:
    """Units one after the other as one."""
    import numpy as np

    return UnitKernels(
        forward=concatenated([unit.forward for unit in units]),
        backward=concatenated([unit.backward for unit in units[::-1]]),
        scope=np.concatenate([unit.scope for unit in units]),
        recomputed=np.concatenate([unit.recomputed for unit in units[::-1]]),
        dense_parameters=sum(unit.dense_parameters for unit in units[:-1]),
        expert_parameters=sum(unit.expert_parameters for unit in units[:-1]),
    )


class _Key:
    """A request as a dictionary key."""

    def __init__(self, request: DryRunRequest) -> None:
        self.request = request
        self.text = json.dumps([request.to_json(), _FORMAT, _versions()], sort_keys=True)

    def __hash__(self) -> int:
        return hash(self.text)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and self.text == other.text


@lru_cache(maxsize=4096)
def _kernels_of(key: _Key) -> ModelKernels:
    path = kernels_path(key.request)
    if path.exists():
        return _load(path)
    from tuner.memory.worker_pool import record

    trace, stated = record(key.request)
    found = read_kernels(trace, key.request, json.loads(stated["parameters"]))
    save_kernels(path, found)
    return found


def kernels_path(request: DryRunRequest) -> Path:
    """Where the kernels of a request are kept."""
    from tuner.memory.composition.measure import cache_folder

    name = hashlib.sha256(_Key(request).text.encode()).hexdigest()[:32]
    return cache_folder() / "kernels" / f"{name}.npz"


def read_kernels(
    trace: Trace, request: DryRunRequest, parameters: Mapping[str, Sequence[int]]
) -> ModelKernels:
    """The units in a trace with boundaries; `parameters` counts those of each, dense and expert."""
    windows = _Windows(trace, request.steps)
    layers = int(request.model["num_layers"])
    has_mtp = markers.MTP_FORWARD_END in windows.names
    after_layers = markers.MTP_BACKWARD_END if has_mtp else markers.HEAD_BACKWARD_END
    last = markers.layer_forward_end(layers - 1)
    head_start = markers.MTP_FORWARD_END if has_mtp else last
    units = {
        EMBEDDING: windows.unit(
            markers.FORWARD_START,
            markers.layer_forward_start(0),
            markers.layer_backward_end(0),
            markers.BACKWARD_END,
            parameters[EMBEDDING],
        ),
        HEAD: windows.unit(
            head_start,
            markers.FORWARD_END,
            markers.BACKWARD_START,
            markers.HEAD_BACKWARD_END,
            parameters[HEAD],
        ),
    }
    if has_mtp:
        units[MTP] = windows.unit(
            last,
            markers.MTP_FORWARD_END,
            markers.HEAD_BACKWARD_END,
            markers.MTP_BACKWARD_END,
            parameters.get(MTP, (0, 0)),
        )
    kinds = _request_kinds(request)
    for layer in range(layers):
        units[kinds[layer]] = windows.unit(
            markers.layer_forward_start(layer),
            markers.layer_forward_end(layer),
            after_layers if layer + 1 == layers else markers.layer_backward_end(layer + 1),
            markers.layer_backward_end(layer),
            parameters[f"layer {layer}"],
        )
    held = [sum(int(counts[kind]) for counts in parameters.values()) for kind in (0, 1)]
    updated = sum(n / shards for n, shards in zip(held, request.optimizer_shards, strict=True))
    optimizer, step = windows.step_bytes()
    return ModelKernels(
        units=units,
        kinds=tuple(kinds),
        hidden_bytes=_hidden_bytes(request),
        optimizer_bytes_per_parameter=optimizer / updated,
        step_bytes_per_parameter=step / sum(held),
    )


def _request_kinds(request: DryRunRequest) -> list[str]:
    return list(layer_kinds(ModelSpec.from_flat(dict(request.model))))


class _Windows:
    """Operations between the markers of the last micro-batch of the last step."""

    def __init__(self, trace: Trace, steps: int) -> None:
        self._trace = trace
        names = [name for _, name in trace.markers]
        first, last = names.index(step_start(steps)), names.index(step_end(steps))
        self.names = {
            names[number]: int(trace.kernel_markers[number]) for number in range(first, last + 1)
        }
        self._step = slice(int(trace.kernel_markers[first]), int(trace.kernel_markers[last]))
        self._scopes = _module_scopes(trace.module_names)
        phases = trace.phase_names
        self._recompute = phases.index("recompute") if "recompute" in phases else -1

    def unit(
        self, forward: str, forward_end: str, backward: str, backward_end: str, counts: Any
    ) -> UnitKernels:
        first = self._between(forward, forward_end)
        second = self._between(backward, backward_end)
        return UnitKernels(
            forward=first,
            backward=second,
            scope=_split_moe(first, self._scopes[first.module]),
            recomputed=second.phase == self._recompute,
            dense_parameters=int(counts[0]),
            expert_parameters=int(counts[1]),
        )

    def _between(self, start: str, end: str) -> KernelLog:
        log = self._trace.kernels.select(slice(self.names[start], self.names[end]))
        return log.select([not GROUPS[group].endswith(_DATA_GROUPS) for group in log.group])

    def step_bytes(self) -> tuple[float, float]:
        """Bytes the optimizer and the rest of the step outside of passes move."""
        log = self._trace.kernels.select(self._step)
        log = log.of_kind("memory", "optimizer", "quantize")
        phases = self._trace.phase_names
        sums = [
            float(log.bytes[log.phase == phases.index(name)].sum()) if name in phases else 0.0
            for name in ("optimizer", "step")
        ]
        return sums[0], sums[1]


_DATA_GROUPS = ("dp", "dp-cp", "optimizer-instance")
"""Groups whose collectives are counted by parameters, not by kernels of a unit."""


def _module_scopes(names: Sequence[str]) -> Any:
    import numpy as np

    return np.array([_SCOPE[_scope_of(name)] for name in names], dtype=np.int8)


def _scope_of(name: str) -> str:
    """The graph scope of a module (megatron/core/transformer/enums.py `CudaGraphScope`)."""
    parts = name.split(".")
    if "mixer" in parts:
        return "mamba"
    if "self_attention" in parts or "input_layernorm" in parts or "self_attn_bda" in parts:
        return "attn"
    if "router" in parts:
        return "moe_router"
    if "experts" in parts or "shared_experts" in parts:
        return "moe"
    if "mlp" in parts or "pre_mlp_layernorm" in parts:
        return "mlp"
    return "other"


def _split_moe(log: KernelLog, scope: Any) -> Any:
    """The scope of each operation, with an expert layer's own work told apart.

    What is filed under the layer itself is its norm and its dispatcher; before the first exchange
    of tokens it is preprocessing (moe_layer.py `preprocess`), after it part of `moe`.
    """
    import numpy as np

    router = np.flatnonzero(scope == _SCOPE["moe_router"])
    if not len(router):
        return scope
    exchange = np.flatnonzero(log.op == OPERATION["all_to_all"])
    first_exchange = exchange[0] if len(exchange) else len(log)
    position = np.arange(len(log))
    own = scope == _SCOPE["mlp"]
    scope = scope.copy()
    scope[own & (position < router[0])] = _SCOPE["moe_router"]
    scope[own & (position > router[-1]) & (position < first_exchange)] = _SCOPE["moe_preprocess"]
    scope[own & (position >= first_exchange)] = _SCOPE["moe"]
    return scope


def _hidden_bytes(request: DryRunRequest) -> float:
    config = request.config
    tokens = request.seq_length * int(config.get("micro_batch_size", 1))
    tokens //= int(config.get("context_parallel_size") or 1)
    if config.get("sequence_parallel"):
        tokens //= int(config.get("tensor_model_parallel_size") or 1)
    return float(tokens * int(request.model["hidden_size"]) * (4 if _is_fp32(request) else 2))


def _is_fp32(request: DryRunRequest) -> bool:
    return request.precision == "fp32"


def _world_size(candidate: Candidate) -> int:
    from tuner.memory.composition.measure import profile_world_size

    return profile_world_size(candidate)


def _data_ranks(candidate: Candidate) -> int:
    dense = candidate.tensor_model_parallel_size * candidate.context_parallel_size
    return _world_size(candidate) // dense


def _versions() -> list[str]:
    from importlib import metadata

    return [metadata.version("megatron-core"), metadata.version("torch")]


_UNIT_ARRAYS = ("scope", "recomputed")
_UNIT_NUMBERS = ("dense_parameters", "expert_parameters")
_WHOLE = ("hidden_bytes", "optimizer_bytes_per_parameter", "step_bytes_per_parameter")


def save_kernels(path: Path, kernels: ModelKernels) -> None:
    """Keep kernels on disk, for any number of processes that do so at once."""
    import numpy as np

    arrays: dict[str, Any] = {"units": np.array(list(kernels.units), dtype=np.str_)}
    arrays["kinds"] = np.array(kernels.kinds, dtype=np.str_)
    arrays |= {name: np.float64(getattr(kernels, name)) for name in _WHOLE}
    for name, unit in kernels.units.items():
        arrays |= unit.forward.to_arrays(f"{name}/forward/")
        arrays |= unit.backward.to_arrays(f"{name}/backward/")
        arrays |= {f"{name}/{part}": getattr(unit, part) for part in _UNIT_ARRAYS}
        arrays |= {f"{name}/{part}": np.int64(getattr(unit, part)) for part in _UNIT_NUMBERS}
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}.{threading.get_ident()}.npz")
    np.savez_compressed(temporary, allow_pickle=False, **arrays)
    temporary.replace(path)


def _load(path: Path) -> ModelKernels:
    import numpy as np

    with np.load(path, allow_pickle=False) as data:
        units = {
            str(name): UnitKernels(
                forward=KernelLog.from_arrays(data, f"{name}/forward/"),
                backward=KernelLog.from_arrays(data, f"{name}/backward/"),
                **{part: data[f"{name}/{part}"] for part in _UNIT_ARRAYS},
                **{part: int(data[f"{name}/{part}"]) for part in _UNIT_NUMBERS},
            )
            for name in data["units"]
        }
        return ModelKernels(
            units=units,
            kinds=tuple(str(kind) for kind in data["kinds"]),
            **{name: float(data[name]) for name in _WHOLE},
        )
