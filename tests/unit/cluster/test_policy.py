"""What follows from each ending."""

import pytest

from trainables.failures import memory_evidence
from tuner.cluster.policy import EXPANDABLE_SEGMENTS, decide
from tuner.measurement import Outcome, TrialResult

FRAGMENTED = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB of "
    "which 1.50 GiB is free. Including non-PyTorch memory, this process has 77.60 GiB memory in "
    "use. Of the allocated memory 60.00 GiB is allocated by PyTorch, and 15.00 GiB is reserved by "
    "PyTorch but unallocated."
)
FULL = FRAGMENTED.replace("60.00 GiB is allocated", "74.90 GiB is allocated").replace(
    "15.00 GiB is reserved", "100.00 MiB is reserved"
)


def out_of_memory(message, **env):
    memory = memory_evidence(message, expandable=bool(env))
    return TrialResult(Outcome.OOM, message, evidence={"memory": memory})


def test_the_numbers_of_an_out_of_memory_message_are_evidence():
    memory = memory_evidence(FRAGMENTED, expandable=False)
    assert memory["requested_bytes"] == 2 * 2**30
    assert memory["free_bytes"] == int(1.5 * 2**30)
    assert memory["reserved_unallocated_bytes"] == 15 * 2**30
    assert memory["kind"] == "oom_fragmentation"


def test_fragmentation_is_tried_once_more_with_expandable_segments_capacity_never():
    decision = decide(out_of_memory(FRAGMENTED), 0, {})
    assert decision.again
    assert decision.env == EXPANDABLE_SEGMENTS
    assert not decide(out_of_memory(FRAGMENTED, expandable=1), 1, EXPANDABLE_SEGMENTS).again
    assert not decide(out_of_memory(FULL), 0, {}).again


def test_every_outcome_has_a_policy_that_ends():
    for outcome in Outcome:
        assert not decide(TrialResult(outcome), 10, {}).again


@pytest.mark.parametrize(
    ("outcome", "again", "blamed", "stops"),
    [
        (Outcome.COMPLETED, False, None, False),
        (Outcome.CRASHED, False, None, False),
        (Outcome.HUNG, True, "n1", False),
        (Outcome.KILLED, True, "n1", False),
        (Outcome.COMMUNICATION, True, "n1", False),
        (Outcome.NODE_LOST, True, None, False),
        (Outcome.PREEMPTED, True, None, False),
        (Outcome.DISK_FULL, False, None, True),
    ],
)
def test_what_follows_a_first_failure(outcome, again, blamed, stops):
    decision = decide(TrialResult(outcome, evidence={"node": "n1"}), 0, {})
    assert (decision.again, decision.blamed, decision.stops) == (again, blamed, stops)
