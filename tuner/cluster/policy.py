"""What follows from how a trial ended: run again, accept, stop; and whether its node is suspect."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tuner.measurement import Outcome, TrialResult

EXPANDABLE_SEGMENTS = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}


@dataclass(frozen=True, slots=True)
class Policy:
    """`retries` more runs, on other nodes where there are some; `blames` the node that failed."""

    retries: int
    blames: bool
    stops: bool = False


_POLICIES: Mapping[Outcome, Policy] = {
    Outcome.COMPLETED: Policy(0, blames=False),
    Outcome.OOM: Policy(0, blames=False),
    Outcome.CRASHED: Policy(0, blames=False),
    Outcome.TIMEOUT: Policy(0, blames=False),
    Outcome.DIVERGED: Policy(0, blames=False),
    Outcome.INTERRUPTED: Policy(0, blames=False),
    Outcome.HUNG: Policy(1, blames=True),
    Outcome.KILLED: Policy(2, blames=True),
    Outcome.SEGFAULT: Policy(1, blames=True),
    Outcome.COMMUNICATION: Policy(1, blames=True),
    Outcome.NODE_LOST: Policy(3, blames=False),
    Outcome.PREEMPTED: Policy(3, blames=False),
    Outcome.DISK_FULL: Policy(0, blames=False, stops=True),
}
"""A crash repeats itself, and so does a candidate that is too large; a lost or preempted node says
nothing about the candidate. The study stops at a full disk: no trial could keep its result."""


@dataclass(frozen=True, slots=True)
class Decision:
    """`again` with the variables of `env` added; `blamed` names the node to look at."""

    again: bool = False
    env: Mapping[str, str] = field(default_factory=dict)
    blamed: str | None = None
    stops: bool = False


def decide(result: TrialResult, earlier: int, env: Mapping[str, str]) -> Decision:
    """What to do about a trial's end after `earlier` other attempts, run with variables `env`.

    Memory that fragmentation kept from being used is tried once more with expandable segments
    (PyTorch's CUDA memory notes); memory that is really used is not.
    """
    policy = _POLICIES[result.outcome]
    if result.outcome is Outcome.OOM:
        memory = result.evidence.get("memory", {})
        fragmented = memory.get("kind") == "oom_fragmentation" and not env
        return Decision(again=fragmented, env=EXPANDABLE_SEGMENTS if fragmented else {})
    return Decision(
        again=earlier < policy.retries,
        env=env,
        blamed=result.evidence.get("node") if policy.blames else None,
        stops=policy.stops,
    )
