import pytest

from trainables.failures import (
    RankFailure,
    describe_exception,
    is_out_of_memory,
    outcome_of,
    root_cause,
)
from tuner.measurement import Outcome

STOPPED = "Signal 15 (SIGTERM) received by PID 7600"
LOST_PEER = "RuntimeError: [gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]"


def failure(rank: int, message: str, time_s: float = 0.0) -> RankFailure:
    return RankFailure(rank, message, time_s, 1)


@pytest.mark.parametrize(
    "message",
    [
        "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB",
        "DistBackendError: NCCL error: unhandled cuda error, Cuda failure 2 'out of memory'",
        "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)",
        "RuntimeError: [enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate "
        "memory: you tried to allocate 80000000 bytes. Error code 12 (Cannot allocate memory)",
        "MemoryError",
        "RuntimeError: std::bad_alloc",
    ],
)
def test_allocation_failures_are_recognised(message: str) -> None:
    assert is_out_of_memory(message)


@pytest.mark.parametrize("message", ["ValueError: memory_limit must be positive", LOST_PEER])
def test_other_failures_are_not_taken_for_them(message: str) -> None:
    assert not is_out_of_memory(message)


def test_the_earliest_failure_is_the_cause() -> None:
    failures = [failure(0, "ValueError: b", 2.0), failure(3, "ValueError: a", 1.0)]
    assert root_cause(failures).rank == 3


def test_a_lost_peer_and_a_stop_signal_are_consequences_even_when_first() -> None:
    failures = [
        failure(0, LOST_PEER, 1.0),
        failure(1, STOPPED, 1.5),
        failure(2, "AssertionError: x", 2.0),
    ]
    assert root_cause(failures).rank == 2
    assert root_cause(failures[:2]).rank == 0


def test_memory_that_ran_out_explains_earlier_failures() -> None:
    failures = [failure(0, "ValueError: a", 1.0), failure(1, "CUDA out of memory", 2.0)]
    assert outcome_of(failures) == (Outcome.OOM, "rank 1: CUDA out of memory")


def test_a_reason_is_one_line_of_bounded_length() -> None:
    outcome, reason = outcome_of([failure(5, "ValueError: " + "x" * 5000)])
    assert outcome is Outcome.CRASHED
    assert reason.startswith("rank 5: ValueError: xxx")
    assert len(reason) <= 400


def test_no_failure_has_no_cause() -> None:
    with pytest.raises(ValueError, match="no failures"):
        root_cause([])


def test_an_exception_is_described_on_one_line() -> None:
    assert describe_exception(ValueError("two\n  lines")) == "ValueError: two lines"
    assert describe_exception(KeyboardInterrupt()) == "KeyboardInterrupt"


def test_the_allocation_failure_inside_a_rephrased_error_is_described() -> None:
    error = RuntimeError("when instantiating TransformerLayer")
    error.__cause__ = MemoryError("no room")
    assert describe_exception(error) == "MemoryError: no room"


def test_failures_survive_their_json_form() -> None:
    one = failure(2, "ValueError: a", 1.25)
    assert RankFailure.from_json(one.to_json()) == one
