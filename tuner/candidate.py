"""A candidate: one complete setting of every tunable field.

A candidate is flat and keyed by the exact Megatron-Core / Megatron Bridge field names. It is a
value: immutable, hashable, and canonical, so that two spellings of the same run are one candidate
with one `key`. Canonical means: fields that Megatron does not read under the other settings are
reset to their default, module lists are sorted, and CUDA-graph fields use the spelling of
Megatron-Core 0.18 and later (`cuda_graph_modules`, `cuda_graph_impl="full_iteration"`);
`to_flat(mcore=...)` writes the spelling a version takes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from tuner.errors import InputError

_MODULE_LISTS = ("recompute_modules", "offload_modules", "cuda_graph_modules")
_LAYOUT_ABBREVIATIONS = {
    "tensor_model_parallel_size": "TP",
    "pipeline_model_parallel_size": "PP",
    "virtual_pipeline_model_parallel_size": "VPP",
    "context_parallel_size": "CP",
    "expert_model_parallel_size": "EP",
    "expert_tensor_parallel_size": "ETP",
    "micro_batch_size": "MBS",
}


def _tunable(default: Any, doc: str) -> Any:
    return field(default=default, metadata={"doc": doc})


@dataclass(frozen=True, slots=True)
class Candidate:
    """One candidate. Build it with `from_flat`, which canonicalises; values are as Megatron's."""

    tensor_model_parallel_size: int = _tunable(1, "tensor parallel ranks (TP)")
    pipeline_model_parallel_size: int = _tunable(1, "pipeline parallel ranks (PP)")
    virtual_pipeline_model_parallel_size: int | None = _tunable(
        None, "model chunks per pipeline rank (VPP); needs PP > 1"
    )
    context_parallel_size: int = _tunable(1, "context parallel ranks (CP)")
    expert_model_parallel_size: int = _tunable(1, "expert parallel ranks (EP)")
    expert_tensor_parallel_size: int | None = _tunable(
        None, "tensor parallel ranks of the experts (ETP); unset is TP"
    )
    micro_batch_size: int = _tunable(1, "sequences per micro-batch")
    sequence_parallel: bool = _tunable(False, "split norms and dropout over TP ranks")
    use_distributed_optimizer: bool = _tunable(True, "shard optimizer state over data parallel")
    recompute_granularity: str | None = _tunable(None, "None, 'selective' or 'full'")
    recompute_method: str | None = _tunable(None, "'uniform' or 'block'; only with 'full'")
    recompute_num_layers: int | None = _tunable(None, "layers per chunk/stage; only with 'full'")
    recompute_modules: tuple[str, ...] = _tunable(
        (), "modules recomputed under 'selective'; none of them is an explicit no-recompute control"
    )
    distribute_saved_activations: bool = _tunable(
        False, "split full recompute's saved inputs over TP ranks"
    )
    cuda_graph_impl: str = _tunable(
        "none", "'none', 'local', 'transformer_engine' or 'full_iteration'"
    )
    cuda_graph_modules: tuple[str, ...] = _tunable(
        (), "graphed parts of a layer; none of them is the whole layer"
    )
    cpu_offloading: bool = _tunable(False, "layer-level activation offload to the host")
    cpu_offloading_num_layers: int = _tunable(0, "layers whose activations are offloaded")
    fine_grained_activation_offloading: bool = _tunable(False, "offload by module")
    offload_modules: tuple[str, ...] = _tunable((), "modules whose inputs are offloaded")
    optimizer_cpu_offload: bool = _tunable(False, "keep optimizer state on the host")
    optimizer_offload_fraction: float = _tunable(0.0, "share of optimizer state on the host")
    env: tuple[tuple[str, str], ...] = _tunable((), "environment of the ranks, as sorted pairs")
    extra: tuple[tuple[str, Any], ...] = _tunable(
        (), "other Megatron fields, passed through and not modelled, as sorted pairs"
    )

    @classmethod
    def from_flat(cls, flat: Mapping[str, Any]) -> Candidate:
        """The candidate of a flat mapping in any supported spelling.

        Unknown fields become `extra`. Values are not validated here: that is the rules' work.
        Raises InputError only where a value has no canonical form (a module list that is not a
        list of names, an `env` that is not a mapping).
        """
        values = _translate_cuda_graph_spelling(dict(flat))
        known = {f.name for f in fields(cls)} - {"env", "extra"}
        own = {name: values.pop(name) for name in list(values) if name in known}
        for name in _MODULE_LISTS:
            if name in own:
                own[name] = _module_tuple(name, own[name])
        if flat.get("recompute_modules") is None:
            own["recompute_modules"] = ("core_attn",)  # TransformerConfig.__post_init__ fills it in
        env = _env_pairs(values.pop("env", None))
        extra = tuple(sorted((k, _freeze(v)) for k, v in values.items() if v is not None))
        return cls(**_drop_unread(own), env=env, extra=extra)

    def to_flat(self, *, mcore: str | None = None) -> dict[str, Any]:
        """The flat mapping; fields that the other settings leave unread are left out.

        With `mcore` ("0.16", "0.17.0", ...) CUDA-graph fields take that version's spelling.
        """
        flat: dict[str, Any] = {}
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name in ("env", "extra"):
                continue
            if value != f.default or f.name in _ALWAYS_WRITTEN:
                flat[f.name] = list(value) if isinstance(value, tuple) else value
        if self.recompute_granularity == "selective":
            flat["recompute_modules"] = list(self.recompute_modules)
        if mcore is not None:
            _spell_cuda_graph(flat, mcore)
        flat.update({name: _thaw(value) for name, value in self.extra})
        if self.env:
            flat["env"] = dict(self.env)
        return flat

    @property
    def key(self) -> str:
        """A short hash, equal for two spellings of one run and stable across processes."""
        text = json.dumps(self.to_flat(), sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def splits_optimizer(self) -> bool:
        """Whether a part of the optimizer is on the host and a part on the device.

        Whole parameters go to the host, so ranks of one pipeline stage differ in what stays.
        """
        return self.optimizer_cpu_offload and 0.0 < self.optimizer_offload_fraction < 1.0

    def model_parallel_size(self) -> int:
        """GPUs of one data-parallel replica: TP x PP x CP."""
        return (
            self.tensor_model_parallel_size
            * self.pipeline_model_parallel_size
            * self.context_parallel_size
        )

    def label(self, world_size: int | None = None) -> str:
        """The layout in short, e.g. "TP2 PP2 VPP2 DP1 MBS1": degrees of one are left out."""
        parts = []
        for name, short in _LAYOUT_ABBREVIATIONS.items():
            value = getattr(self, name)
            if short == "MBS":
                if world_size is not None:
                    parts.append(f"DP{world_size // max(1, self.model_parallel_size())}")
                parts.append(f"MBS{value}")
            elif value not in (None, 1):
                parts.append(f"{short}{value}")
        return " ".join(parts)

    def memory_label(self, hidden: Collection[str] = ()) -> str:
        """Recompute, graph and offload settings in short, e.g. "selective core_attn,mlp".

        Fields that the tuner does not model follow with their values, but those in `hidden`.
        """
        parts = [_recompute_label(self)]
        if self.cuda_graph_impl != "none":
            scope = ",".join(self.cuda_graph_modules) or "layer"
            parts.append(
                "graph full_iteration"
                if self.cuda_graph_impl == "full_iteration"
                else f"graph {self.cuda_graph_impl} {scope}"
            )
        if self.cpu_offloading:
            parts.append(f"offload {self.cpu_offloading_num_layers} layers")
        if self.fine_grained_activation_offloading:
            parts.append(f"offload {','.join(self.offload_modules)}")
        if self.optimizer_cpu_offload:
            parts.append(f"optimizer offload {self.optimizer_offload_fraction:g}")
        shown = ((name, value) for name, value in self.extra if name not in hidden)
        parts += [f"{name}={_thaw(value)}" for name, value in shown]
        return ", ".join(parts)


DEFAULTS: Mapping[str, Any] = {f.name: f.default for f in fields(Candidate)}
"""What each tunable field is where a flat mapping does not name it."""

_ALWAYS_WRITTEN = {
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "micro_batch_size",
    "sequence_parallel",
    "use_distributed_optimizer",
    "recompute_granularity",
}


def _recompute_label(candidate: Candidate) -> str:
    if candidate.recompute_granularity == "full":
        label = f"full {candidate.recompute_method} {candidate.recompute_num_layers}"
        return label + (" distributed" if candidate.distribute_saved_activations else "")
    if candidate.recompute_granularity == "selective":
        return f"selective {','.join(candidate.recompute_modules) or '(no module)'}"
    return "no recompute"


def _module_tuple(name: str, value: object) -> tuple[str, ...]:
    """A module list as a sorted tuple without repeats; None and "" are no modules."""
    if value is None or value == "":
        return ()
    if isinstance(value, str):
        value = value.split(",")
    if not isinstance(value, Sequence) or not all(isinstance(v, str) for v in value):
        raise InputError(
            f"{value!r} is not a list of module names",
            field=name,
            fix="write e.g. [core_attn, mlp]",
        )
    return tuple(sorted({v.strip() for v in value} - {""}))


def _env_pairs(value: object) -> tuple[tuple[str, str], ...]:
    if value is None:
        return ()
    if not isinstance(value, Mapping):
        raise InputError(f"{value!r} is not a mapping of variables", field="env")
    return tuple(sorted((str(k), str(v)) for k, v in value.items() if v is not None))


def _freeze(value: Any) -> Any:
    """A hashable form of a JSON value; `_thaw` undoes it."""
    if isinstance(value, Mapping):
        return ("\0map", tuple(sorted((str(k), _freeze(v)) for k, v in value.items())))
    if isinstance(value, (list, tuple)):
        return tuple(_freeze(v) for v in value)
    return value


def _thaw(value: Any) -> Any:
    if isinstance(value, tuple):
        if len(value) == 2 and value[0] == "\0map":
            return {k: _thaw(v) for k, v in value[1]}
        return [_thaw(v) for v in value]
    return value


def _translate_cuda_graph_spelling(flat: dict[str, Any]) -> dict[str, Any]:
    """The older CUDA-graph fields in the spelling of Megatron-Core 0.18.

    Only the unambiguous cases are moved (TransformerConfig.__post_init__ of 0.18 does the same);
    anything else is left for the rules to refuse.
    """
    if "cuda_graph_scope" in flat and not flat.get("cuda_graph_modules"):
        flat["cuda_graph_modules"] = flat.pop("cuda_graph_scope")
        if flat["cuda_graph_modules"] is None:
            del flat["cuda_graph_modules"]
    if "cuda_graph_modules" not in flat:
        return flat
    modules = _module_tuple("cuda_graph_modules", flat["cuda_graph_modules"])
    if modules == ("full",):
        modules = ()
    if modules == ("full_iteration",) and flat.get("cuda_graph_impl") == "local":
        flat["cuda_graph_impl"], modules = "full_iteration", ()
    flat["cuda_graph_modules"] = modules
    return flat


def _spell_cuda_graph(flat: dict[str, Any], mcore: str) -> None:
    """Write the CUDA-graph fields as Megatron-Core `mcore` takes them, in place."""
    modules = flat.pop("cuda_graph_modules", [])
    impl = flat.get("cuda_graph_impl", "none")
    if impl == "none":
        return
    if takes_cuda_graph_modules(mcore):
        if impl != "full_iteration":
            flat["cuda_graph_modules"] = modules
    elif impl == "full_iteration":
        flat["cuda_graph_impl"], flat["cuda_graph_scope"] = "local", ["full_iteration"]
    else:
        flat["cuda_graph_scope"] = modules


def takes_cuda_graph_modules(mcore: str) -> bool:
    """Whether this Megatron-Core version spells the field `cuda_graph_modules` (0.18 and later)."""
    major, minor = (int(part) for part in (mcore.split(".") + ["0"])[:2])
    return (major, minor) >= (0, 18)


def _drop_unread(own: dict[str, Any]) -> dict[str, Any]:
    """Leave out fields that Megatron-Core does not read under the other settings."""
    granularity = own.get("recompute_granularity")
    unread = set()
    if granularity is None:
        unread |= {"recompute_method", "recompute_num_layers"}
    if granularity != "full":
        unread |= {"distribute_saved_activations"}
    if granularity != "selective":
        unread |= {"recompute_modules"}
    if own.get("cuda_graph_impl", "none") == "none":
        unread |= {"cuda_graph_modules"}
    if not own.get("cpu_offloading"):
        unread |= {"cpu_offloading_num_layers"}
    if not own.get("fine_grained_activation_offloading"):
        unread |= {"offload_modules"}
    if not own.get("optimizer_cpu_offload"):
        unread |= {"optimizer_offload_fraction"}
    return {name: value for name, value in own.items() if name not in unread}
