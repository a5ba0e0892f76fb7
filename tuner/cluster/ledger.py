"""Which devices of which nodes are free, and where a trial fits."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from tuner.cluster.placement import Placement


@dataclass(frozen=True, slots=True)
class Node:
    """One node of the study: `devices` GPUs (or CPU ranks), in an NVLink domain."""

    name: str
    devices: int
    domain: str = ""


@dataclass(frozen=True, slots=True)
class Seat:
    """The devices of one node that a trial has, by their number on the node.

    `entry` counts how often the node had been taken in before: a node that was lost and came back
    owes nothing to the trials of before.
    """

    node: str
    devices: tuple[int, ...]
    entry: int = 0


Seats = tuple[Seat, ...]


class Ledger:
    """Books the devices of a set of nodes. Nothing here knows Ray."""

    def __init__(self, nodes: Iterable[Node] = ()) -> None:
        self._nodes: dict[str, Node] = {}
        self._free: dict[str, frozenset[int]] = {}
        self._entries: Counter[str] = Counter()
        for node in nodes:
            self.add(node)

    def add(self, node: Node) -> None:
        """Take a node in, with all its devices free."""
        self._nodes[node.name] = node
        self._free[node.name] = frozenset(range(node.devices))

    def remove(self, name: str) -> None:
        """Forget a node that is lost or quarantined; what trials hold of it is not missed."""
        if name in self._nodes:
            del self._nodes[name], self._free[name]
            self._entries[name] += 1

    @property
    def nodes(self) -> tuple[str, ...]:
        return tuple(self._nodes)

    def copy(self) -> Ledger:
        """A ledger of the same state, for trying out."""
        other = Ledger()
        other._nodes, other._free = dict(self._nodes), dict(self._free)
        other._entries = self._entries.copy()
        return other

    def emptied(self) -> Ledger:
        """A ledger of the same nodes with everything free."""
        return Ledger(self._nodes.values())

    def take(self, seats: Seats) -> None:
        """Book seats that `find` gave. Raises ValueError where a device is not free."""
        for seat in seats:
            if not self._free[seat.node].issuperset(seat.devices):
                raise ValueError(f"devices {seat.devices} of {seat.node} are not free")
            self._free[seat.node] -= frozenset(seat.devices)

    def give(self, seats: Seats) -> None:
        """Free seats; those of a node that is gone, or was in between, are ignored."""
        for seat in seats:
            if seat.node in self._free and seat.entry == self._entries[seat.node]:
                self._free[seat.node] |= frozenset(seat.devices)

    def find(self, placement: Placement, avoid: frozenset[str] = frozenset()) -> Seats | None:
        """Free seats for a trial, none on a node of `avoid`; None where there are none.

        A small trial goes where it leaves the fewest devices over. A larger one gets whole nodes
        from as few NVLink domains as possible.
        """
        names = [name for name in self._nodes if name not in avoid]
        if len(placement.ranks) == 1:
            return self._find_small(placement.ranks[0], names)
        return self._find_whole(placement, names)

    def _find_small(self, count: int, names: Iterable[str]) -> Seats | None:
        fitting = [(len(self._free[n]), n) for n in names if len(self._free[n]) >= count]
        if not fitting:
            return None
        _, name = min(fitting)
        return (self._seat(name, sorted(self._free[name])[:count]),)

    def _find_whole(self, placement: Placement, names: Iterable[str]) -> Seats | None:
        each, together = placement.ranks[0], placement.nodes_in_domain
        domains: dict[str, list[str]] = defaultdict(list)
        for name in names:
            node = self._nodes[name]
            if len(self._free[name]) == node.devices >= each:
                domains[node.domain].append(name)
        chosen: list[str] = []
        wanted = len(placement.ranks)
        # A domain gives whole groups only; the tightest that suffices, else the largest.
        usable = {
            d: sorted(found)[: len(found) // together * together] for d, found in domains.items()
        }
        while wanted and any(usable.values()):
            enough = [d for d, found in usable.items() if len(found) >= wanted]
            best = (
                min(enough, key=lambda d: (len(usable[d]), d))
                if enough
                else max(usable, key=lambda d: (len(usable[d]), d))
            )
            taken = usable.pop(best)[:wanted]
            chosen += taken
            wanted -= len(taken)
        if wanted:
            return None
        return tuple(self._seat(name, range(each)) for name in chosen)

    def _seat(self, name: str, devices: Iterable[int]) -> Seat:
        return Seat(name, tuple(devices), self._entries[name])
