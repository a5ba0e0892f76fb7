"""Which bundles of a Ray cluster a candidate's trial reserves."""

from __future__ import annotations

from dataclasses import dataclass

from tuner.errors import InputError


@dataclass(frozen=True, slots=True)
class Placement:
    """One bundle per node. `ranks` are the processes each bundle's node runs, in node order."""

    ranks: tuple[int, ...]
    device: str

    @property
    def bundles(self) -> list[dict[str, float]]:
        """Ray resource bundles: a GPU and a CPU per rank, or a CPU per rank on the CPU device."""
        if self.device == "cpu":
            return [{"CPU": float(n)} for n in self.ranks]
        return [{"CPU": float(n), "GPU": float(n)} for n in self.ranks]

    @property
    def strategy(self) -> str:
        """Ray placement strategy: different nodes for different bundles."""
        return "PACK" if len(self.ranks) == 1 else "STRICT_SPREAD"


def place(world_size: int, *, nodes: int, gpus_per_node: int, device: str) -> Placement:
    """The placement of `world_size` ranks on a cluster of `nodes` x `gpus_per_node`.

    Small trials take part of one node; larger ones take whole nodes. Raises InputError where the
    ranks do not fit the cluster or do not fill whole nodes.
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
    return Placement((gpus_per_node,) * (world_size // gpus_per_node), device)
