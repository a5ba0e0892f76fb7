"""Booking of devices, and the order in which waiting trials get them."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tuner.cluster.ledger import Ledger, Node, Seat
from tuner.cluster.placement import Placement
from tuner.cluster.waiting import Running, Waiting, WaitingLine


def nodes(count, devices=8, per_domain=None):
    return [
        Node(f"n{i:02d}", devices, f"d{i // per_domain}" if per_domain else f"n{i:02d}")
        for i in range(count)
    ]


def small(ranks):
    return Placement((ranks,), "cuda")


def whole(count, together=1):
    return Placement((8,) * count, "cuda", together)


def names(seats):
    return [seat.node for seat in seats]


def test_small_trials_fill_a_started_node_before_an_empty_one():
    ledger = Ledger(nodes(2))
    ledger.take((Seat("n01", (0, 1, 2)),))
    assert ledger.find(small(4)) == (Seat("n01", (3, 4, 5, 6)),)
    assert names(ledger.find(small(6))) == ["n00"]
    assert ledger.find(small(6), avoid=frozenset(["n00"])) is None


def test_a_device_cannot_be_booked_twice():
    ledger = Ledger(nodes(1))
    seats = ledger.find(small(4))
    ledger.take(seats)
    with pytest.raises(ValueError, match="not free"):
        ledger.take(seats)


def test_whole_nodes_come_from_as_few_domains_as_possible():
    ledger = Ledger(nodes(6, per_domain=3))
    ledger.take((Seat("n00", (0,)),))
    assert names(ledger.find(whole(2))) == ["n01", "n02"]
    assert names(ledger.find(whole(3))) == ["n03", "n04", "n05"]


def test_groups_of_nodes_never_straddle_a_domain():
    ledger = Ledger(nodes(6, per_domain=3))
    found = names(ledger.find(whole(4, together=2)))
    assert {tuple(found[:2]), tuple(found[2:])} == {("n00", "n01"), ("n03", "n04")}
    assert ledger.find(whole(6, together=2)) is None


def test_seats_of_a_lost_node_are_given_back_to_nobody():
    ledger = Ledger(nodes(2))
    seats = ledger.find(whole(2))
    ledger.take(seats)
    ledger.remove("n00")
    ledger.give(seats)
    assert ledger.find(whole(2)) is None
    assert names(ledger.find(small(8))) == ["n01"]


def test_small_trials_overtake_only_off_the_promised_nodes_or_in_time():
    ledger = Ledger(nodes(3))
    busy = (Seat("n00", tuple(range(8))),)
    ledger.take(busy)
    running = [Running(busy, ends_at=100.0)]
    line = WaitingLine()
    line.add(Waiting(1, whole(3), expected_s=10.0))
    line.add(Waiting(2, small(8), expected_s=200.0))
    assert line.next(ledger, running, now=0.0) is None  # would hold up the large trial
    line.add(Waiting(3, small(8), expected_s=50.0))
    trial, seats = line.next(ledger, running, now=0.0)
    assert trial.number == 3
    ledger.take(seats)
    running.append(Running(seats, ends_at=50.0))
    line.add(Waiting(4, small(8), expected_s=1.0))
    # The running trial is late: from the promised moment on nobody overtakes.
    assert line.next(ledger, running, now=101.0) is None


def test_the_largest_that_fits_beside_the_promised_nodes_overtakes_first():
    ledger, line = Ledger(nodes(4)), WaitingLine()
    held = ledger.find(Placement((8,), "cuda"))
    ledger.take(held)
    line.add(Waiting(0, Placement((8,) * 4, "cuda"), 10.0))
    line.add(Waiting(1, Placement((1,), "cuda"), 5.0))
    line.add(Waiting(2, Placement((8,) * 3, "cuda"), 5.0))
    started, _ = line.next(ledger, [Running(held, 100.0)], 0.0)
    assert started.number == 2


def test_a_larger_trial_starts_first_where_both_have_room():
    ledger, line = Ledger(nodes(3)), WaitingLine()
    for number, ranks in enumerate([(1,), (8, 8, 8), (8,), (8, 8), (4,)]):
        line.add(Waiting(number, Placement(ranks, "cuda"), 10))
    order = []
    while (found := line.next(ledger, [], 0.0)) is not None:
        ledger.take(found[1])
        order.append(found[0].number)
    # Three nodes would leave the first none; two leave it one, of which a larger one takes a part.
    assert order == [3, 4, 0]


def test_a_trial_avoids_a_node_only_while_others_can_hold_it():
    ledger = Ledger(nodes(2))
    line = WaitingLine()
    line.add(Waiting(1, small(8), 1.0, avoid=frozenset(["n00"])))
    assert names(line.next(ledger, [], 0.0)[1]) == ["n01"]
    ledger.remove("n01")
    line.add(Waiting(2, small(8), 1.0, avoid=frozenset(["n00"])))
    assert names(line.next(ledger, [], 0.0)[1]) == ["n00"]


def test_trials_larger_than_the_nodes_left_are_hopeless():
    line = WaitingLine()
    line.add(Waiting(1, whole(2), 1.0))
    line.add(Waiting(2, small(2), 1.0))
    assert [trial.number for trial in line.hopeless(Ledger(nodes(1)))] == [1]
    assert len(line) == 1


@settings(max_examples=30, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from([1, 2, 4, 8, 16, 32, 64]), st.integers(1, 40)),
        min_size=40,
        max_size=80,
    )
)
def test_every_trial_starts_and_large_ones_wait_for_little_more_than_what_ran_before(jobs):
    """A virtual clock: late trials (twice their estimate) included, nobody starves."""
    ledger, line, running, now = Ledger(nodes(8)), WaitingLine(), [], 0.0
    for number, (ranks, seconds) in enumerate(jobs):
        placement = small(ranks) if ranks <= 8 else whole(ranks // 8)
        line.add(Waiting(number, placement, seconds / 2))
    order = []
    while len(line) or running:
        found = line.next(ledger, [Running(s, start + e) for s, start, e, _ in running], now)
        if found is not None:
            trial, seats = found
            ledger.take(seats)
            running.append((seats, now, trial.expected_s, now + 2 * trial.expected_s))
            order.append(trial.number)
            continue
        now = min(end for *_, end in running)
        for one in [r for r in running if r[3] <= now]:
            ledger.give(one[0])
            running.remove(one)
    assert sorted(order) == list(range(len(jobs)))
    work = sum(ranks * seconds for ranks, seconds in jobs)
    assert now <= 2.5 * max(work / 64, max(seconds for _, seconds in jobs)) + 40
