"""What a candidate's trial asks of a cluster: ranks per node, and which nodes must be close."""

from __future__ import annotations

from dataclasses import dataclass

from tuner.errors import InputError


@dataclass(frozen=True, slots=True)
class Placement:
    """Ranks of each node, in rank order.

    `nodes_in_domain` consecutive nodes must share an NVLink domain, because a tensor- or
    expert-parallel group of the layout spans them.
    """

    ranks: tuple[int, ...]
    device: str
    nodes_in_domain: int = 1

    @property
    def world_size(self) -> int:
        return sum(self.ranks)


def place(
    world_size: int,
    *,
    nodes: int,
    gpus_per_node: int,
    device: str,
    domain_gpus: int | None = None,
    tensor_parallel: int = 1,
    expert_parallel: int = 1,
) -> Placement:
    """The placement of `world_size` ranks on a cluster of `nodes` x `gpus_per_node`.

    Small trials take part of one node; larger ones take whole nodes. `domain_gpus` is the size of
    an NVLink domain, None where that does not count. Tensor-parallel groups (consecutive ranks in
    Megatron's order, `RankGenerator` in parallel_state.py) must lie in one domain;
    `expert_parallel`, the ranks of an expert group, does where it fits one.

    Raises InputError where the ranks do not fit the cluster, do not fill whole nodes, or a
    tensor-parallel group does not fit a domain.
    """
    if world_size > nodes * gpus_per_node:
        raise InputError(
            f"{world_size} ranks do not fit {nodes} nodes of {gpus_per_node}",
            field="world_size",
            fix=f"use at most {nodes * gpus_per_node}",
        )
    if world_size <= gpus_per_node:
        return Placement((world_size,), device)
    if world_size % gpus_per_node:
        raise InputError(
            f"{world_size} ranks are no whole number of nodes of {gpus_per_node}",
            field="world_size",
            fix=f"use a multiple of {gpus_per_node}",
        )
    ranks = (gpus_per_node,) * (world_size // gpus_per_node)
    if domain_gpus is None:
        return Placement(ranks, device)
    domain_gpus = max(domain_gpus, gpus_per_node)
    together = _nodes_of_group(tensor_parallel, gpus_per_node, domain_gpus)
    if together is None:
        raise InputError(
            f"tensor_model_parallel_size={tensor_parallel} leaves the NVLink domain of "
            f"{domain_gpus} GPUs on nodes of {gpus_per_node}",
            field="tensor_model_parallel_size",
            fix=f"use a divisor of {domain_gpus}",
        )
    experts = _nodes_of_group(expert_parallel, gpus_per_node, domain_gpus)
    return Placement(ranks, device, max(together, experts or 1))


def _nodes_of_group(group: int, gpus_per_node: int, domain_gpus: int) -> int | None:
    """Nodes that groups of consecutive ranks tie together; None where no domain holds a group."""
    if gpus_per_node % group == 0:
        return 1
    if group % gpus_per_node or group > domain_gpus:
        return None
    return group // gpus_per_node
