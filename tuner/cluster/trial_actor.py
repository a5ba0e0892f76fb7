"""The Ray Tune trainable: one trial, run by the agents of the nodes it was given.

The actor itself needs next to nothing and stays on Ray's head node, so Ray reuses it for the next
trial and the loss of a node does not take it along. The result always comes back as a
`TrialResult`, never as an exception.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ray import tune

from tuner.measurement import Outcome, TrialResult

RESULT_KEY = "trial_result"
_OTHERS_WAIT_S = 5.0
"""After one node failed, for the others to fail for a reason of their own."""
_CANCEL_WAIT_S = 30.0
_TELLING = (
    Outcome.OOM,
    Outcome.DISK_FULL,
    Outcome.NODE_LOST,
    Outcome.SEGFAULT,
    Outcome.KILLED,
    Outcome.DIVERGED,
    Outcome.HUNG,
    Outcome.PREEMPTED,
    Outcome.CRASHED,
    Outcome.TIMEOUT,
    Outcome.COMMUNICATION,
    Outcome.INTERRUPTED,
)
"""Failures of nodes, from causes to consequences."""


class TrialActor(tune.Trainable):
    """One trial: `config` holds the spec, the seats (agent, node, devices) and the folder."""

    def setup(self, config: dict[str, Any]) -> None:
        self._config = config

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        self._config = new_config
        return True

    def step(self) -> dict[str, Any]:
        started = time.monotonic()
        try:
            result = run_on_seats(self._config)
        except Exception as error:
            # Ray itself failed: still an outcome of this trial.
            result = TrialResult(
                Outcome.NODE_LOST, f"launch failed: {type(error).__name__}: {error}"
            )
        result = replace(result, duration_s=time.monotonic() - started)
        # As text: Tune flattens nested results, and the searcher would get it in pieces.
        return {RESULT_KEY: json.dumps(result.to_json()), "done": True}

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Trials are not checkpointed: one that is cut short is run again."""

    def load_checkpoint(self, checkpoint: object) -> None:
        """See `save_checkpoint`."""


def run_on_seats(config: Mapping[str, Any]) -> TrialResult:
    """Run the trial on all its nodes; the first node's result, or the failure that explains it."""
    import ray

    seats = config["seats"]
    dispatch_s = time.time() - config["assigned_at"]
    agents = []
    for seat in seats:
        try:
            agents.append(ray.get_actor(seat["agent"]))
        except ValueError:
            return _located(_lost(), seat["node"], seats)
    address: str = "127.0.0.1"
    port: int | None = None
    if len(agents) > 1:
        address = seats[0]["address"]
        answer: Any = ray.get(agents[0].free_port.remote())
        port = int(answer)
    references = [
        agent.run.remote(config, node_rank, address, port) for node_rank, agent in enumerate(agents)
    ]
    results = _collect(references, agents, config["number"])
    node, result = _telling(results)
    result = _located(result, seats[node]["node"], seats)
    return replace(result, evidence={**result.evidence, "dispatch_s": round(dispatch_s, 4)})


def _collect(
    references: Sequence[Any], agents: Sequence[Any], number: int
) -> dict[int, TrialResult]:
    """Results by node. Once one has failed the others are stopped after a moment."""
    import ray

    results: dict[int, TrialResult] = {}
    waiting = {reference: node for node, reference in enumerate(references)}
    deadline: float | None = None
    cancelled = False
    while waiting:
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        ready, _ = ray.wait(list(waiting), num_returns=1, timeout=left)
        if not ready:
            if cancelled:
                results |= {node: _lost() for node in waiting.values()}
                break
            for node in waiting.values():
                agents[node].cancel.remote(number)
            cancelled, deadline = True, time.monotonic() + _CANCEL_WAIT_S
            continue
        node = waiting.pop(ready[0])
        results[node] = _result(ready[0])
        if results[node].outcome is not Outcome.COMPLETED and deadline is None:
            deadline = time.monotonic() + _OTHERS_WAIT_S
    return results


def _result(reference: Any) -> TrialResult:
    import ray

    try:
        return TrialResult.from_json(ray.get(reference))
    except ray.exceptions.RayError as error:
        return _lost(str(error).splitlines()[0])


def _lost(why: str = "the node, or the tuner's process on it, is gone") -> TrialResult:
    return TrialResult(Outcome.NODE_LOST, why)


def _telling(results: Mapping[int, TrialResult]) -> tuple[int, TrialResult]:
    failed = [item for item in results.items() if item[1].outcome is not Outcome.COMPLETED]
    if not failed:
        return 0, results[0]
    return min(failed, key=lambda item: (_TELLING.index(item[1].outcome), item[0]))


def _located(result: TrialResult, node: str, seats: Sequence[Mapping[str, Any]]) -> TrialResult:
    """The result with the nodes of the trial, and the one that failed, in its evidence."""
    evidence = {**result.evidence, "nodes": [seat["node"] for seat in seats]}
    if result.outcome is not Outcome.COMPLETED:
        evidence["node"] = node
    return replace(result, evidence=evidence)
