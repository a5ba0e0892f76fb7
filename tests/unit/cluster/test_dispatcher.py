"""Trials on their way through line, nodes and retries, on nodes that exist in a ledger only."""

import pytest

from tuner.candidate import Candidate
from tuner.cluster.dispatcher import Dispatcher, Flight
from tuner.cluster.ledger import Ledger, Node
from tuner.cluster.placement import Placement
from tuner.measurement import Outcome, TrialResult
from tuner.search.records import Proposal


class Nodes:
    """Nodes without processes; keeps what it was told."""

    def __init__(self, count: int) -> None:
        self.ledger = Ledger(Node(f"n{i}", 8, f"n{i}") for i in range(count))
        self.cancelled: list[int] = []
        self.blamed: list[str | None] = []

    def refresh(self) -> None: ...

    def tend(self) -> None: ...

    def note(self, result, blamed) -> None:
        self.blamed.append(blamed)

    def cancel(self, number, seats) -> None:
        self.cancelled.append(number)

    def seats_json(self, seats):
        return []


def flight(number, ranks=(8,)):
    candidate = Candidate.from_flat({"micro_batch_size": number + 1})
    return Flight(Proposal(number, candidate), Placement(ranks, "cuda"), 10.0)


@pytest.fixture
def clock():
    return [0.0]


@pytest.fixture
def dispatcher(clock):
    return Dispatcher(Nodes(2), lambda: clock[0])


def failed(outcome, flight, **evidence):
    return TrialResult(
        outcome, "why", duration_s=5.0, evidence={"node": flight.seats[0].node, **evidence}
    )


def test_a_trial_that_lost_its_node_runs_again_elsewhere_and_tells_of_both(dispatcher):
    dispatcher.submit(flight(0))
    first = dispatcher.next()
    _, decision = dispatcher.ended(0, failed(Outcome.KILLED, first), died=False)
    assert decision.again
    second = dispatcher.next()
    assert second.seats[0].node != first.seats[0].node
    result, decision = dispatcher.ended(0, TrialResult(Outcome.COMPLETED, duration_s=3), died=False)
    assert not decision.again
    assert result.duration_s == 8.0
    assert [a["outcome"] for a in result.evidence["attempts"]] == ["killed"]
    assert dispatcher.running == dispatcher.waiting == 0


def test_a_trial_fails_for_good_after_its_retries(dispatcher):
    dispatcher.submit(flight(0))
    for last in (False, True):
        now = dispatcher.next()
        result, decision = dispatcher.ended(0, failed(Outcome.HUNG, now), died=False)
        assert decision.again is not last
    assert result.outcome is Outcome.HUNG
    assert dispatcher.has_room(Placement((8, 8), "cuda"))


def test_expandable_segments_are_set_for_the_second_run_on_the_same_nodes(dispatcher):
    dispatcher.submit(flight(0, (8, 8)))
    memory = {"kind": "oom_fragmentation"}
    dispatcher.ended(0, failed(Outcome.OOM, dispatcher.next(), memory=memory), died=False)
    again = dispatcher.next()
    assert "expandable_segments:True" in again.env.values()
    result, decision = dispatcher.ended(0, failed(Outcome.OOM, again, memory=memory), died=False)
    assert not decision.again
    assert result.evidence["env"] == dict(again.env)


def test_ranks_of_a_dead_actor_are_stopped_before_their_devices_are_used_again(dispatcher):
    dispatcher.submit(flight(0))
    dispatcher.next()
    dispatcher.ended(0, TrialResult(Outcome.NODE_LOST), died=True)
    assert dispatcher._nodes.cancelled == [0]


def test_devices_of_a_node_that_came_back_are_not_freed_by_its_former_trials(dispatcher):
    ledger = dispatcher._nodes.ledger
    ledger.remove("n1")
    dispatcher.submit(flight(0))
    before = dispatcher.next()
    ledger.remove("n0")
    ledger.add(Node("n0", 8, "n0"))
    dispatcher.submit(flight(1))
    assert dispatcher.next().seats[0].node == "n0"
    dispatcher.ended(0, TrialResult(Outcome.COMPLETED), died=False)
    assert before.seats[0].node == "n0"
    assert not dispatcher.has_room(Placement((1,), "cuda"))


def test_nodes_have_a_while_to_come_back_before_a_trial_is_given_up(dispatcher, clock):
    dispatcher.submit(flight(0, (8, 8)))
    dispatcher._nodes.ledger.remove("n1")
    assert dispatcher.next() is None
    assert dispatcher.give_up() == []
    clock[0] = 61.0
    ((_, result),) = dispatcher.give_up()
    assert result.outcome is Outcome.NODE_LOST
    assert dispatcher.waiting == 0
