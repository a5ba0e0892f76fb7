"""The line of trials that wait for nodes: first come, first served, with safe overtaking.

The first in line is promised the nodes that come free soonest. Others may overtake it on nodes it
is not promised, or where they end before it could start (backfilling with one reservation; Lifka,
"The ANL/IBM SP scheduling system", 1995), the largest first: small ones would break up the room
that only few fit. Once that moment has passed, nobody overtakes on promised nodes, so trials that
run longer than expected cannot starve a large one.

While the first could start together with a larger one, the larger one starts before it: an empty
cluster is full after a few starts, and small trials are left to fill gaps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tuner.cluster.ledger import Ledger, Seats
from tuner.cluster.placement import Placement


@dataclass(frozen=True, slots=True)
class Waiting:
    """A trial in line. `expected_s` is how long it will run; it stays off the nodes in `avoid`."""

    number: int
    placement: Placement
    expected_s: float
    avoid: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Running:
    """What a started trial holds, and when it should end (seconds of the caller's clock)."""

    seats: Seats
    ends_at: float


class WaitingLine:
    """Trials in the order in which they get nodes."""

    def __init__(self) -> None:
        self._line: list[Waiting] = []
        self._promised_at: dict[int, float] = {}

    def __len__(self) -> int:
        return len(self._line)

    def add(self, trial: Waiting, *, first: bool = False) -> None:
        """Put a trial at the end of the line, or at its head (one that is run again)."""
        self._line.insert(0 if first else len(self._line), trial)

    def next(
        self, ledger: Ledger, running: Sequence[Running], now: float
    ) -> tuple[Waiting, Seats] | None:
        """The trial to start now and its seats, taken off the line; None where none can start."""
        if not self._line:
            return None
        head = self._line[0]
        seats = ledger.find(head.placement, _avoided(head, ledger))
        if seats is not None:
            return self._larger(head, ledger) or (self._start(head), seats)
        start_at, promised = _reservation(head, ledger, running)
        latest = min(start_at, self._promised_at.setdefault(head.number, start_at))
        for trial in sorted(self._line[1:], key=lambda one: -one.placement.world_size):
            avoid = _avoided(trial, ledger)
            seats = ledger.find(trial.placement, avoid | promised)
            if seats is None and now + trial.expected_s <= latest:
                seats = ledger.find(trial.placement, avoid)
            if seats is not None:
                return self._start(trial), seats
        return None

    def _larger(self, head: Waiting, ledger: Ledger) -> tuple[Waiting, Seats] | None:
        """The largest trial of those larger than the head that leaves it room to start, too."""
        size = head.placement.world_size
        larger = [trial for trial in self._line[1:] if trial.placement.world_size > size]
        for trial in sorted(larger, key=lambda one: -one.placement.world_size):
            seats = ledger.find(trial.placement, _avoided(trial, ledger))
            if seats is None:
                continue
            left = ledger.copy()
            left.take(seats)
            if left.find(head.placement, _avoided(head, left)) is not None:
                return self._start(trial), seats
        return None

    def hopeless(self, ledger: Ledger) -> list[Waiting]:
        """Trials too large for the nodes there are, taken off the line."""
        idle = ledger.emptied()
        out = [trial for trial in self._line if idle.find(trial.placement) is None]
        for trial in out:
            self._start(trial)
        return out

    def _start(self, trial: Waiting) -> Waiting:
        self._line.remove(trial)
        self._promised_at.pop(trial.number, None)
        return trial


def _avoided(trial: Waiting, ledger: Ledger) -> frozenset[str]:
    """Nodes to stay off; none where the others could never hold the trial."""
    if not trial.avoid or ledger.emptied().find(trial.placement, trial.avoid) is None:
        return frozenset()
    return trial.avoid


def _reservation(
    head: Waiting, ledger: Ledger, running: Sequence[Running]
) -> tuple[float, frozenset[str]]:
    """When the head can start if trials end as expected, and on which nodes."""
    later = ledger.copy()
    for trial in sorted(running, key=lambda trial: trial.ends_at):
        later.give(trial.seats)
        seats = later.find(head.placement, _avoided(head, ledger))
        if seats is not None:
            return trial.ends_at, frozenset(seat.node for seat in seats)
    return float("inf"), frozenset()
