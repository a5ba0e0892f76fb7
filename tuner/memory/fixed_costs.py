"""Device memory outside PyTorch's allocator: CUDA context, communicators, userbuffers.

It takes from what the allocator may reserve. Figures and their sources stand in
`fixed_costs.yaml`. Workspaces of cuBLAS and Transformer Engine are not here: libraries take them
from PyTorch's allocator, and the dry run records them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

import yaml

from tuner.candidate import Candidate
from tuner.hardware import Gpu
from tuner.memory.expert_buffers import deepep_bytes, hybridep_bytes

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
    """One item and where its figure comes from."""

    name: str
    bytes: int
    source: str


@dataclass(frozen=True, slots=True)
class FixedCosts:
    """The fixed costs of a rank."""

    items: tuple[FixedCost, ...]

    @property
    def total_bytes(self) -> int:
        """Bytes that the device lacks for PyTorch's allocator."""
        return sum(item.bytes for item in self.items)

    def to_json(self) -> list[dict[str, Any]]:
        return [
            {"name": item.name, "bytes": item.bytes, "source": item.source} for item in self.items
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
    data_ranks = max(1, world_size // (tp * pp))  # data and context parallel together
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
    hidden_size: int = 0,
    experts: int = 0,
) -> FixedCosts:
    """The fixed costs of a rank of `candidate` on `gpu`.

    `hidden_bytes` is the size of one micro-batch's hidden states on one tensor-parallel group,
    which Transformer Engine's userbuffers repeat when `tp_comm_overlap` is set. `hidden_size` and
    the number of `experts` size the buffers of the flex dispatcher.
    """
    data = _data()
    opened = communicators(
        candidate, world_size=world_size, link_domain=gpu.link_domain_gpus, moe=moe
    )
    lazy = gpu.compute_capability >= (9, 0) and gpu.vendor == "nvidia"
    items = [
        _item("CUDA context", data["cuda_context"][gpu.architecture]),
        *(_nccl(communicator, lazy, data["nccl"]) for communicator in opened),
    ]
    extra = dict(candidate.extra)
    if candidate.tensor_model_parallel_size > 1 and extra.get("tp_comm_overlap"):
        entry = data["userbuffers"]
        buffers = entry["value"] - (entry["gathered"] / 2 if extra.get("fp8") else 0)
        items.append(FixedCost("userbuffers", int(buffers * hidden_bytes), entry["source"]))
    if experts and extra.get("moe_token_dispatcher_type") == "flex":
        items.append(_dispatcher(candidate, extra, hidden_bytes, hidden_size, experts))
    return FixedCosts(tuple(items))


def _dispatcher(
    candidate: Candidate, extra: dict[str, Any], hidden_bytes: int, hidden_size: int, experts: int
) -> FixedCost:
    """Buffers that ranks with experts write into each other (`tuner/memory/expert_buffers.py`)."""
    split = candidate.tensor_model_parallel_size
    expert_split = candidate.expert_tensor_parallel_size or split
    ranks = candidate.expert_model_parallel_size * expert_split
    if extra.get("moe_flex_dispatcher_backend", "deepep") == "deepep":
        return FixedCost("DeepEP buffers", deepep_bytes(ranks, hidden_size), "deepseek-ai/DeepEP")
    tokens = hidden_bytes // (2 * hidden_size) // split
    size = hybridep_bytes(ranks, tokens, hidden_size, experts * expert_split)
    return FixedCost("HybridEP buffers", size, "deepseek-ai/DeepEP, branch hybrid-ep")


def _item(name: str, entry: dict[str, Any]) -> FixedCost:
    return FixedCost(name, int(entry["mib"] * _MIB), entry["source"])


def _nccl(communicator: Communicator, lazy: bool, data: dict[str, Any]) -> FixedCost:
    """Buffers of a communicator: rings for collectives, channels to each peer otherwise.

    `lazy`: NCCL connects an algorithm at its first use, as versions for newer GPUs do: rings only.
    """
    name = f"NCCL {communicator.group} ({communicator.ranks} ranks)"
    channel = data["channel"]["mib"] * _MIB
    if communicator.peers_in_domain or communicator.peers_over_network:
        size = channel * (
            communicator.peers_in_domain * data["channels_per_peer"]["value"]
            + communicator.peers_over_network * data["network_channels_per_peer"]["value"]
        )
        return FixedCost(name, size, data["channel"]["source"])
    if lazy:
        size = channel * data["collective_channels"]["value"]
        return FixedCost(name, size, data["collective_channels"]["source"])
    return _item(name, data["collective"]["pair" if communicator.ranks == 2 else "more"])


@cache
def _data() -> dict[str, Any]:
    text = (resources.files("tuner.memory") / "fixed_costs.yaml").read_text(encoding="utf-8")
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    data: dict[str, Any] = yaml.load(text, Loader=loader)  # noqa: S506 - a safe loader
    return data
