"""How a trial's processes fail, and what to call it.

Every rank that raises writes a torch error file; the agent that started the ranks collects them.
From these, one failure is the cause and the rest are its consequences (a peer that closed its
connection, a process the launcher stopped).
"""

from __future__ import annotations

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

    Memory that ran out explains whatever else happened; otherwise the earliest error that is not
    itself the loss of a peer or a stop signal from the launcher.
    """
    ordered = sorted(failures, key=lambda failure: (failure.time_s, failure.rank))
    if not ordered:
        raise ValueError("no failures to explain")
    for failure in ordered:
        if failure.is_out_of_memory:
            return failure
    for failure in ordered:
        if not _is_consequence(failure):
            return failure
    return ordered[0]


def outcome_of(failures: Iterable[RankFailure]) -> tuple[Outcome, str]:
    """The outcome and one-line reason of a trial whose ranks failed."""
    cause = root_cause(failures)
    outcome = Outcome.OOM if cause.is_out_of_memory else Outcome.CRASHED
    return outcome, f"rank {cause.rank}: {cause.message}"[:_REASON_LENGTH]


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
