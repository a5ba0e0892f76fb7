"""Device memory that no tensor of the model explains: context, communicators, workspaces.

Figures and their sources stand in `fixed_costs.yaml`. What lies outside PyTorch's allocator takes
from what the allocator may reserve; what lies inside is part of allocated bytes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

import yaml

from tuner.candidate import Candidate
from tuner.hardware import Gpu

_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Communicator:
    """A NCCL communicator of one rank: its Megatron group, its size, and who it talks to.

    `peers_in_domain` and `peers_over_network` count the ranks it sends to point to point; a
    communicator of collectives has none of either.
    """

    group: str
    ranks: int
    peers_in_domain: int = 0
    peers_over_network: int = 0


@dataclass(frozen=True, slots=True)
class FixedCost:
    """One item. `inside` says whether PyTorch's allocator holds it (and reports it)."""

    name: str
    bytes: int
    inside: bool
    source: str


@dataclass(frozen=True, slots=True)
class FixedCosts:
    """The fixed costs of a rank."""

    items: tuple[FixedCost, ...]

    @property
    def inside_bytes(self) -> int:
        """Bytes that PyTorch's allocator holds for libraries."""
        return sum(item.bytes for item in self.items if item.inside)

    @property
    def outside_bytes(self) -> int:
        """Bytes that the device lacks for PyTorch's allocator."""
        return sum(item.bytes for item in self.items if not item.inside)

    def to_json(self) -> list[dict[str, Any]]:
        return [
            {
                "name": item.name,
                "bytes": item.bytes,
                "inside_allocator": item.inside,
                "source": item.source,
            }
            for item in self.items
        ]


def communicators(
    candidate: Candidate, *, world_size: int, link_domain: int, moe: bool = False
) -> tuple[Communicator, ...]:
    """The communicators that a rank of `candidate` opens, as Megatron-Core's groups lie.

    Ranks run through TP, CP (or EP), DP and PP in this order
    (megatron/core/parallel_state.py, `initialize_model_parallel`), so a group's stride tells
    whether its neighbours share an NVLink domain of `link_domain` GPUs. NCCL opens a communicator
    at its first use; groups that a training step leaves unused cost nothing.
    """
    tp, cp = candidate.tensor_model_parallel_size, candidate.context_parallel_size
    pp, ep = candidate.pipeline_model_parallel_size, candidate.expert_model_parallel_size
    etp = candidate.expert_tensor_parallel_size or tp
    data_ranks = world_size // (tp * pp)  # data and context parallel together
    found = [Communicator("world", world_size)]
    found += [Communicator("tensor", tp)]
    found += [_point_to_point("context", cp, min(2, cp - 1), tp, link_domain)]
    found += [Communicator("data", data_ranks)]
    stage_peers = 2 if candidate.virtual_pipeline_model_parallel_size or pp > 2 else pp - 1
    found += [
        _point_to_point("pipeline", pp, min(stage_peers, pp - 1), data_ranks * tp, link_domain)
    ]
    if moe:
        found += [_point_to_point("expert", ep, ep - 1, etp, link_domain)]
        found += [Communicator("expert tensor", etp)]
        found += [Communicator("expert data", world_size // (etp * ep * pp))]
    return tuple(communicator for communicator in found if communicator.ranks > 1)


def _point_to_point(
    group: str, ranks: int, peers: int, stride: int, link_domain: int
) -> Communicator:
    """A communicator of sends and receives whose ranks are `stride` apart."""
    peers_in_domain = min(peers, max(0, link_domain // stride - 1))
    return Communicator(group, ranks, peers_in_domain, peers - peers_in_domain)


def fixed_costs(
    candidate: Candidate,
    *,
    gpu: Gpu,
    world_size: int,
    moe: bool = False,
    hidden_bytes: int = 0,
    transformer_engine: bool = True,
) -> FixedCosts:
    """The fixed costs of a rank of `candidate` on `gpu`.

    `hidden_bytes` is the size of one micro-batch's hidden states on one tensor-parallel group,
    which Transformer Engine's userbuffers repeat when `tp_comm_overlap` is set.
    """
    data = _data()
    hopper = gpu.compute_capability >= (9, 0) and gpu.vendor == "nvidia"  # or newer
    overlap = candidate.tensor_model_parallel_size > 1 and bool(
        dict(candidate.extra).get("tp_comm_overlap")
    )
    opened = communicators(
        candidate, world_size=world_size, link_domain=gpu.link_domain_gpus, moe=moe
    )
    items = [
        _item("CUDA context", data["cuda_context"][gpu.architecture], inside=False),
        *(_nccl(communicator, hopper, data["nccl"]) for communicator in opened),
        _cublas(gpu, dict(candidate.env).get("CUBLAS_WORKSPACE_CONFIG", ""), data["cublas"]),
    ]
    if transformer_engine:
        items += _transformer_engine(hopper, overlap, moe, data["transformer_engine"])
    if overlap:
        entry = data["transformer_engine"]["userbuffers"]
        size = entry["value"] * hidden_bytes
        items.append(FixedCost("userbuffers", size, False, entry["source"]))
    return FixedCosts(tuple(items))


def _item(name: str, entry: dict[str, Any], *, inside: bool, times: int = 1) -> FixedCost:
    size = entry["value"] if "value" in entry else int(entry["mib"] * _MIB)
    return FixedCost(name, size * times, inside, entry["source"])


def _nccl(communicator: Communicator, hopper: bool, data: dict[str, Any]) -> FixedCost:
    """Buffers of a communicator: rings for collectives, channels to each peer otherwise."""
    name = f"NCCL {communicator.group} ({communicator.ranks} ranks)"
    channel = data["channel_mib"]["mib"] * _MIB
    if communicator.peers_in_domain or communicator.peers_over_network:
        size = channel * (
            communicator.peers_in_domain * data["channels_per_peer"]["value"]
            + communicator.peers_over_network * data["network_channels_per_peer"]["value"]
        )
        return FixedCost(name, size, False, data["channel_mib"]["source"])
    if hopper:  # the NCCL of that time connects an algorithm at its first use: rings only
        size = channel * data["collective_channels"]["value"]
        return FixedCost(name, size, False, data["collective_channels"]["source"])
    entry = data["collective_mib"]["pair" if communicator.ranks == 2 else "more"]
    return _item(name, entry, inside=False)


def _cublas(gpu: Gpu, configured: str, data: dict[str, Any]) -> FixedCost:
    """Workspaces by architecture, or as CUBLAS_WORKSPACE_CONFIG says (":KIB:COUNT" repeated)."""
    entry = data["hopper" if gpu.architecture == "hopper" else "other"]
    pairs = re.findall(r":(\d+):(\d+)", configured)
    if pairs:
        entry = {
            "value": sum(int(kib) * int(count) << 10 for kib, count in pairs),
            "source": f"CUBLAS_WORKSPACE_CONFIG={configured}",
        }
    return _item("cuBLAS workspaces", entry, inside=True, times=data["threads"]["value"])


def _transformer_engine(
    hopper: bool, overlap: bool, moe: bool, data: dict[str, Any]
) -> Iterator[FixedCost]:
    entry = data["gemm_hopper_bytes" if hopper else "gemm_older_bytes"]
    streams = data["userbuffer_streams"]["value"] if overlap else 1
    yield _item("Transformer Engine workspace", entry, inside=True, times=streams)
    if moe:
        grouped = data["grouped_gemm_streams"]["value"]
        yield _item("Transformer Engine grouped workspace", entry, inside=True, times=grouped)


@cache
def _data() -> dict[str, Any]:
    text = (resources.files("tuner.memory") / "fixed_costs.yaml").read_text(encoding="utf-8")
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    data: dict[str, Any] = yaml.load(text, Loader=loader)  # noqa: S506 - a safe loader
    return data
