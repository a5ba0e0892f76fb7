"""Which ranks a group joins, and over which links.

Ranks are numbered as Megatron-Core does by default (parallel_state.py `RankGenerator`): tensor
parallel innermost, then context parallel, data parallel, pipeline; experts in a grid of their own,
expert-tensor innermost, then expert parallel, expert data parallel, pipeline.
"""

from __future__ import annotations

from dataclasses import dataclass

from tuner.candidate import Candidate
from tuner.hardware import Gpu


@dataclass(frozen=True, slots=True)
class Links:
    """Links of a cluster, one direction, per GPU.

    `domain` GPUs are joined by NVLink; others by the network, at `network_bytes_per_s` times
    `1 / oversubscription` where its upper layers are thinner than its edge.
    """

    domain: int
    link_bytes_per_s: float
    network_bytes_per_s: float

    @classmethod
    def of(
        cls,
        gpu: Gpu,
        *,
        gpus_per_node: int | None = None,
        link_domain_gpus: int | None = None,
        oversubscription: float = 1.0,
    ) -> Links:
        """The links of a cluster of `gpu`; an NVLink domain is at least a node."""
        node = gpus_per_node or gpu.gpus_per_node
        return cls(
            domain=link_domain_gpus or max(gpu.link_domain_gpus, min(node, gpu.gpus_per_node)),
            link_bytes_per_s=gpu.link_bandwidth_bytes_per_s,
            network_bytes_per_s=gpu.network_bandwidth_bytes_per_s / oversubscription,
        )


@dataclass(frozen=True, slots=True)
class Span:
    """A group of ranks: how many, and how many of them share an NVLink domain."""

    size: int
    local: int

    @property
    def domains(self) -> int:
        """NVLink domains the group reaches over."""
        return -(-self.size // self.local)


def span(size: int, stride: int, links: Links, world_size: int) -> Span:
    """The span of `size` ranks, `stride` apart."""
    domain = min(links.domain, world_size)
    return Span(size, max(1, min(size, domain // max(1, stride))))


def group_span(name: str, size: int, candidate: Candidate, links: Links, world_size: int) -> Span:
    """The span of a process group by its short name in `kernel_log.GROUPS`."""
    return span(size, _stride(name, candidate, world_size), links, world_size)


def _stride(name: str, candidate: Candidate, world_size: int) -> int:
    tensor = candidate.tensor_model_parallel_size
    expert_tensor = candidate.expert_tensor_parallel_size or tensor
    return {
        "cp": tensor,
        "dp": tensor * candidate.context_parallel_size,
        "dp-cp": tensor,
        "ep": expert_tensor,
        "expt-dp": expert_tensor * candidate.expert_model_parallel_size,
        "pp": max(1, world_size // candidate.pipeline_model_parallel_size),
        "embedding": max(1, world_size // candidate.pipeline_model_parallel_size),
    }.get(name, 1)
