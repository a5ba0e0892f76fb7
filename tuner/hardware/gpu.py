"""The packaged GPU figures: one YAML file for each GPU in `tuner/hardware/gpus/`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from types import MappingProxyType
from typing import Any

import yaml

from tuner.errors import InputError, nearest_name

_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Gpu:
    """One kind of GPU. Rates are peaks; arithmetic is dense; bandwidths are for one direction.

    `usable_memory_bytes` is what the driver reports as the device's total, which is less than the
    memory printed on the data sheet (`memory_bytes`). `peak_flops` maps a number format ("fp32",
    "tf32", "bf16", "fp16", "fp8", "fp4") to floating-point operations a second; a format that the
    GPU lacks is absent. `link_bandwidth` joins the `link_domain_gpus` GPUs of one NVLink (or
    Infinity Fabric) domain; `network_bandwidth` is that of one GPU's share of a usual node.
    """

    name: str
    vendor: str
    architecture: str
    compute_capability: tuple[int, int]
    memory_bytes: int
    usable_memory_bytes: int
    memory_bandwidth_bytes_per_s: float
    peak_flops: Mapping[str, float]
    multiprocessors: int
    link_bandwidth_bytes_per_s: float
    link_domain_gpus: int
    gpus_per_node: int
    host_bandwidth_bytes_per_s: float
    network_bandwidth_bytes_per_s: float


def gpu_names() -> tuple[str, ...]:
    """Every GPU that `get_gpu` knows, by its full name, sorted."""
    return tuple(sorted(read_entry(stem)["name"] for stem in _files()))


def get_gpu(name: str) -> Gpu:
    """The GPU of a name or alias, without regard to case, dashes, spaces and "NVIDIA".

    Raises InputError naming the nearest known GPU.
    """
    stem = _by_spelling().get(_normalise(name))
    if stem is None:
        hint = nearest_name(name, [*gpu_names(), *_aliases()])
        known = f"known are {', '.join(gpu_names())}"
        raise InputError(f"unknown GPU {name!r}", field="gpu", fix=f"{hint} {known}".strip())
    return _load(stem)


def read_entry(stem: str) -> dict[str, Any]:
    """The whole file of a GPU, sources included, by the name of its file without `.yaml`."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    entry = yaml.load(_files()[stem].read_text(encoding="utf-8"), Loader=loader)  # noqa: S506 - safe
    if not isinstance(entry, dict):
        raise InputError(f"GPU file {stem}.yaml is not a mapping")
    return entry


@cache
def _load(stem: str) -> Gpu:
    entry = read_entry(stem)

    def value(field: str, factor: float = 1.0) -> float:
        return float(entry[field]["value"]) * factor

    major, minor = entry["compute_capability"].split(".")
    rates = {name: float(rate["value"]) * 1e12 for name, rate in entry["peak_tflops"].items()}
    return Gpu(
        name=entry["name"],
        vendor=entry["vendor"],
        architecture=entry["architecture"],
        compute_capability=(int(major), int(minor)),
        memory_bytes=int(value("memory_gb", 1e9)),
        usable_memory_bytes=int(value("usable_memory_gib", _GIB)),
        memory_bandwidth_bytes_per_s=value("memory_bandwidth_gb_per_s", 1e9),
        peak_flops=MappingProxyType(rates),
        multiprocessors=int(value("multiprocessors")),
        link_bandwidth_bytes_per_s=value("link_bandwidth_gb_per_s", 1e9),
        link_domain_gpus=int(value("link_domain_gpus")),
        gpus_per_node=int(value("gpus_per_node")),
        host_bandwidth_bytes_per_s=value("host_bandwidth_gb_per_s", 1e9),
        network_bandwidth_bytes_per_s=value("network_bandwidth_gb_per_s", 1e9),
    )


@cache
def _files() -> dict[str, resources.abc.Traversable]:
    folder = resources.files("tuner.hardware") / "gpus"
    return {
        entry.name.removesuffix(".yaml"): entry
        for entry in folder.iterdir()
        if entry.name.endswith(".yaml")
    }


@cache
def _aliases() -> tuple[str, ...]:
    return tuple(alias for stem in _files() for alias in read_entry(stem).get("aliases", ()))


@cache
def _by_spelling() -> dict[str, str]:
    """File name of every accepted spelling, normalised."""
    found: dict[str, str] = {}
    for stem in _files():
        entry = read_entry(stem)
        for spelling in [entry["name"], *entry.get("aliases", ())]:
            found[_normalise(spelling)] = stem
    return found


def _normalise(name: str) -> str:
    """Letters and digits only, lower case, without the vendor."""
    return re.sub(r"[^a-z0-9]|nvidia|amd|instinct|tensorcoregpu", "", str(name).lower())
