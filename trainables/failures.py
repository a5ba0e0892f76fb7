"""How a trial's processes fail, and what to call it.

Every rank that raises writes a torch error file; the agent that started the ranks collects them.
From these, one failure is the cause and the rest are its consequences (a peer that closed its
connection, a process the launcher stopped).
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from tuner.measurement import Outcome

_REASON_LENGTH = 400

_OUT_OF_MEMORY_SIGNS = (
    "out of memory",
    "can't allocate memory",
    "cannot allocate memory",
    "not enough memory",
    "cublas_status_alloc_failed",
    "std::bad_alloc",
    "memoryerror",
)
"""Lower-case fragments of allocation failures of CUDA, NCCL, cuBLAS, PyTorch's CPU allocator, C++
and Python."""

_DISK_SIGNS = (
    "no space left on device",
    "disk quota exceeded",
    "file too large",
    "errno 28",
    "errno 122",
)
"""Lower-case texts of ENOSPC, EDQUOT and EFBIG."""

_COMMUNICATION_SIGNS = (
    "ncclsystemerror",
    "ncclinternalerror",
    "ncclremoteerror",
    "ncclunhandledcudaerror",
    "nccl error",
    "nccl warn",
    "nccl communicator was aborted",
    "collective operation timeout",
    "watchdog",
    "distbackenderror",
    "distnetworkerror",
    "diststoreerror",
    "rendezvous",
    "timed out waiting",
    "timed out after",
    "connectfullmesh failed",
    "connection refused",
    "address already in use",
    "nvshmem",
    "gloo/transport",
)
"""Lower-case fragments of failed or stalled communication: NCCL, Gloo, c10d, NVSHMEM."""

_SIGNAL = re.compile(r"signal \d+ \((sig\w+)\)|ended by (sig\w+)", re.IGNORECASE)
_REACHES_ALL = ("SIGTERM", "SIGINT", "SIGABRT")
"""Signals a launcher sends to the ranks left over, and the one of a rank that ends itself."""

_SIGNAL_OUTCOMES = {
    "SIGKILL": Outcome.KILLED,
    "SIGSEGV": Outcome.SEGFAULT,
    "SIGBUS": Outcome.SEGFAULT,
    "SIGILL": Outcome.SEGFAULT,
    "SIGFPE": Outcome.SEGFAULT,
    "SIGTERM": Outcome.PREEMPTED,
}

_CONSEQUENCE_SIGNS = (
    "connection closed by peer",
    "connection reset by peer",
    "broken pipe",
    "ncclremoteerror",
    "remote process exited",
    "socket timeout",
)
"""Lower-case fragments of errors a rank sees because another rank has gone."""


@dataclass(frozen=True, slots=True)
class RankFailure:
    """One rank's end other than success. `time_s` is seconds since the epoch."""

    rank: int
    message: str
    time_s: float
    exit_code: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> RankFailure:
        return cls(**data)

    @property
    def is_out_of_memory(self) -> bool:
        return is_out_of_memory(self.message)


def describe_exception(error: BaseException) -> str:
    """`Type: message` on one line, with the cause where the chain hides it.

    The message of an allocation failure is preferred: frameworks rephrase it on the way up.
    """
    chain = list(_chain(error))
    telling = next((link for link in chain if is_out_of_memory(_line(link))), error)
    return _line(telling)


def is_out_of_memory(message: str) -> bool:
    """Whether an error message speaks of memory that could not be had."""
    lowered = message.lower()
    return any(sign in lowered for sign in _OUT_OF_MEMORY_SIGNS)


def root_cause(failures: Iterable[RankFailure]) -> RankFailure:
    """The failure that explains the others.

    Memory that ran out explains whatever else happened; then a process that a signal killed, which
    its peers may notice before the launcher does; otherwise the earliest error that is not itself
    the loss of a peer or a stop signal from the launcher.
    """
    ordered = sorted(failures, key=lambda failure: (failure.time_s, failure.rank))
    if not ordered:
        raise ValueError("no failures to explain")
    for is_root in (_ran_out, _was_killed, lambda failure: not _is_consequence(failure)):
        found = next(filter(is_root, ordered), None)
        if found is not None:
            return found
    return ordered[0]


def outcome_of(failures: Iterable[RankFailure]) -> tuple[Outcome, str]:
    """The outcome and one-line reason of a trial whose ranks failed."""
    cause = root_cause(failures)
    return kind_of_failure(cause.message), f"rank {cause.rank}: {cause.message}"[:_REASON_LENGTH]


def kind_of_failure(message: str) -> Outcome:
    """What an error message, or a signal's name in it, says went wrong."""
    if is_out_of_memory(message):
        return Outcome.OOM
    lowered = message.lower()
    if any(sign in lowered for sign in _DISK_SIGNS):
        return Outcome.DISK_FULL
    name = signal_name(message)
    if name in _SIGNAL_OUTCOMES:
        return _SIGNAL_OUTCOMES[name]
    signs = (*_COMMUNICATION_SIGNS, *_CONSEQUENCE_SIGNS)
    if any(sign in lowered for sign in signs):
        return Outcome.COMMUNICATION
    return Outcome.CRASHED


def signal_name(message: str) -> str | None:
    """The signal that ended a process, as the launcher words it; None where there is none."""
    found = _SIGNAL.search(message)
    return None if found is None else (found[1] or found[2]).upper()


def signal_text(number: int) -> str:
    """A process's end by a signal, as `signal_name` reads it."""
    return f"Signal {number} ({signal.Signals(number).name}) received"


def memory_evidence(message: str, *, expandable: bool) -> dict[str, Any]:
    """Requested, free and unused reserved bytes of an allocator's message, and what they mean.

    `kind` is that of `tuner diagnose`: "oom_fragmentation" where unused reserved memory would have
    sufficed and segments were not expandable. Empty where the message is none of the allocator's.
    """
    from tuner.diagnose.memory import OUT_OF_MEMORY, kind_of, read_numbers

    if not OUT_OF_MEMORY.search(message):
        return {}
    numbers = read_numbers(message)
    kind, _, why = kind_of(numbers, expandable=expandable)
    return {"kind": kind, "why": why, **numbers.to_json()}


def _ran_out(failure: RankFailure) -> bool:
    return failure.is_out_of_memory


def _was_killed(failure: RankFailure) -> bool:
    return signal_name(failure.message) not in (None, *_REACHES_ALL)


def _is_consequence(failure: RankFailure) -> bool:
    lowered = failure.message.lower()
    return "sigterm" in lowered or any(sign in lowered for sign in _CONSEQUENCE_SIGNS)


def _chain(error: BaseException | None) -> Iterable[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
