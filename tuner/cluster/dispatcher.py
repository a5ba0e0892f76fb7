"""Trials on their way: in line, on nodes, and back in line when they have to run again."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from tuner.cluster.ledger import Ledger, Seats
from tuner.cluster.placement import Placement
from tuner.cluster.policy import Decision, decide
from tuner.cluster.waiting import Running, Waiting, WaitingLine
from tuner.measurement import Outcome, TrialResult
from tuner.search.records import Proposal

_PATIENCE_S = 60.0


class Nodes(Protocol):
    """What the dispatcher needs of a fleet."""

    @property
    def ledger(self) -> Ledger: ...

    def refresh(self) -> None: ...

    def tend(self) -> None: ...

    def note(self, result: TrialResult, blamed: str | None) -> None: ...

    def cancel(self, number: int, seats: Seats) -> None: ...

    def seats_json(self, seats: Seats) -> list[dict[str, Any]]: ...


@dataclass(frozen=True, slots=True)
class Flight:
    """A trial that has been proposed and has not ended. `env` was added to the candidate's."""

    proposal: Proposal
    placement: Placement
    expected_s: float
    attempts: tuple[Mapping[str, Any], ...] = ()
    spent_s: float = 0.0
    env: Mapping[str, str] = field(default_factory=dict)
    seats: Seats = ()
    submitted_at: float = 0.0
    started_at: float = 0.0


class Dispatcher:
    """Gives waiting trials their nodes and decides what follows from how they end."""

    def __init__(self, nodes: Nodes, clock: Callable[[], float] = time.monotonic) -> None:
        self._nodes, self._clock = nodes, clock
        self._line = WaitingLine()
        self._waiting: dict[int, Flight] = {}
        self._running: dict[int, Flight] = {}
        self._stuck_since: float | None = None

    @property
    def waiting(self) -> int:
        """Trials in line."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Trials on nodes."""
        return len(self._running)

    def has_room(self, placement: Placement) -> bool:
        """Whether a trial of this shape could start now, with nobody in line before it."""
        return not self._waiting and self._nodes.ledger.find(placement) is not None

    def submit(self, flight: Flight) -> None:
        """Put a new trial in line."""
        flight = replace(flight, submitted_at=self._clock())
        self._join(flight, avoid=frozenset(), first=False)

    def next(self) -> Flight | None:
        """The trial to start now, its nodes booked; None where none can."""
        now = self._clock()
        held = [Running(f.seats, f.started_at + f.expected_s) for f in self._running.values()]
        found = self._line.next(self._nodes.ledger, held, now)
        if found is None:
            if self._waiting:
                self._nodes.tend()
            return None
        self._stuck_since = None
        waiting, seats = found
        flight = replace(self._waiting.pop(waiting.number), seats=seats, started_at=now)
        self._nodes.ledger.take(seats)
        self._running[waiting.number] = flight
        return flight

    def ended(
        self, number: int, result: TrialResult, *, died: bool
    ) -> tuple[TrialResult, Decision]:
        """Take a trial off its nodes. The result as the study keeps it, and what follows.

        `died`: its actor went away, so the ranks may still run. A trial that runs again is back in
        line, and its result is one attempt.
        """
        flight = self._running.pop(number)
        if died:
            self._nodes.cancel(number, flight.seats)
        self._nodes.ledger.give(flight.seats)
        decision = decide(result, len(flight.attempts), flight.env)
        self._nodes.note(result, decision.blamed)
        spent_s = flight.spent_s + result.duration_s
        if decision.again:
            self._again(flight, result, decision, spent_s)
            return result, decision
        waited_s = round(flight.started_at - flight.submitted_at, 4)
        evidence = {**result.evidence, "waited_s": waited_s}
        if flight.attempts:
            evidence["attempts"] = list(flight.attempts)
        if flight.env:
            evidence["env"] = dict(flight.env)
        return replace(result, duration_s=spent_s, evidence=evidence), decision

    def give_up(self) -> list[tuple[Flight, TrialResult]]:
        """Trials that the nodes left cannot hold, taken out of line with their results.

        For when nothing runs. Nodes have a while to come back: until then the list is empty.
        """
        now = self._clock()
        if self._stuck_since is None:
            self._stuck_since = now
            self._nodes.refresh()
        if now - self._stuck_since < _PATIENCE_S:
            return []
        self._nodes.refresh()
        out = []
        for waiting in self._line.hopeless(self._nodes.ledger):
            flight = self._waiting.pop(waiting.number)
            out.append((flight, _no_nodes(flight)))
        return out

    def drain(self) -> list[Proposal]:
        """Empty the line; what was in it."""
        proposals = [flight.proposal for flight in self._waiting.values()]
        self._waiting.clear()
        self._line = WaitingLine()
        return proposals

    def _again(
        self, flight: Flight, result: TrialResult, decision: Decision, spent_s: float
    ) -> None:
        attempt = {
            "outcome": result.outcome.value,
            "reason": result.reason,
            "nodes": [seat.node for seat in flight.seats],
            "duration_s": round(result.duration_s, 3),
        }
        failed = result.evidence.get("node")
        elsewhere = frozenset([failed]) if failed is not None and not decision.env else frozenset()
        flight = replace(
            flight,
            attempts=(*flight.attempts, attempt),
            spent_s=spent_s,
            env=decision.env,
            seats=(),
        )
        self._join(flight, avoid=elsewhere, first=True)

    def _join(self, flight: Flight, *, avoid: frozenset[str], first: bool) -> None:
        number = flight.proposal.number
        self._waiting[number] = flight
        self._line.add(Waiting(number, flight.placement, flight.expected_s, avoid), first=first)


def _no_nodes(flight: Flight) -> TrialResult:
    attempts: Sequence[Mapping[str, Any]] = flight.attempts
    return TrialResult(
        Outcome.NODE_LOST,
        f"no {len(flight.placement.ranks)} usable node(s) are left for it",
        duration_s=flight.spent_s,
        evidence={"attempts": list(attempts)} if attempts else {},
    )
