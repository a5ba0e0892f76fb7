"""The nodes of a study on Ray: an agent on each, checked before use and set aside when broken."""

from __future__ import annotations

import logging
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tuner.cluster.ledger import Ledger, Node, Seats
from tuner.measurement import Outcome, TrialResult

_LOG = logging.getLogger(__name__)
_START_TIMEOUT_S = 300.0
_CHECK_TIMEOUT_S = 180.0
_CANCEL_TIMEOUT_S = 40.0
_LOOK_EVERY_S = 20.0
_DEATHS = 3  # of a node's agent before the node is set aside
_STRIKES = 2  # failures blamed on a node that passed its check before it is set aside
_SLOW_SHARE = {"cuda": 0.7, "cpu": 0.2}
"""Share of the median node's rate below which a node is slow. Other work on shared cores disturbs
CPU nodes; GPUs of one kind differ by a few per cent (power and clocks)."""


@dataclass(frozen=True, slots=True)
class RayNode:
    """A node of the Ray cluster that the study may use."""

    ray_id: str
    name: str
    address: str
    domain: str


class Fleet:
    """Starts, watches and ends the agents; keeps the ledger to the nodes that can be used."""

    def __init__(
        self,
        study_id: str,
        *,
        trainable: str,
        device: str,
        nodes: int,
        devices: int,
        health_check: bool,
        folder: Path,
        find_nodes: Callable[[], Sequence[RayNode]],
    ) -> None:
        self.ledger = Ledger()
        self.quarantined: dict[str, str] = {}
        self._study_id, self._trainable, self._device = study_id, trainable, device
        self._wanted, self._devices = nodes, devices
        self._health_check, self._folder = health_check, folder
        self._find_nodes = find_nodes
        self._nodes: dict[str, RayNode] = {}
        self._agents: dict[str, tuple[str, Any]] = {}
        self._deaths: Counter[str] = Counter()
        self._strikes: Counter[str] = Counter()
        self._started = 0
        self._looked = 0.0

    def refresh(self) -> None:
        """Forget nodes and agents that are gone; take in nodes until there are as many as wanted.

        Waits for the checks of the nodes that are new.
        """
        self._looked = time.monotonic()
        alive = {node.name: node for node in self._find_nodes()}
        for name in list(self._agents):
            if name not in alive:
                self._drop(name)
                _LOG.warning("node %s is lost", name)
            elif not _answered(self._agents[name][1].ready.remote()):
                self._drop(name)
                self._deaths[name] += 1
                if self._deaths[name] >= _DEATHS:
                    self._set_aside(name, f"the tuner's process there died {_DEATHS} times")
        spare = [n for n in alive.values() if n.name not in {*self._agents, *self.quarantined}]
        while spare and len(self._agents) < self._wanted:
            missing = self._wanted - len(self._agents)
            started, spare = spare[:missing], spare[missing:]
            self._take_in(started)

    def seats_json(self, seats: Seats) -> list[dict[str, Any]]:
        """Seats as `TrialActor` takes them."""
        return [
            {
                "agent": self._agents[seat.node][0],
                "node": seat.node,
                "address": self._nodes[seat.node].address,
                "devices": list(seat.devices),
            }
            for seat in seats
        ]

    def note(self, result: TrialResult, blamed: str | None) -> None:
        """Learn from a trial's end: refresh after a loss, check a node that is blamed for one."""
        if result.outcome is Outcome.NODE_LOST:
            self.refresh()
        if blamed is None or blamed not in self._agents:
            return
        self._strikes[blamed] += 1
        if self._strikes[blamed] >= _STRIKES and len(self._agents) > 1:
            self._set_aside(blamed, f"{_STRIKES} trials failed there, the last: {result.reason}")
            self.refresh()

    def cancel(self, number: int, seats: Seats) -> None:
        """Have the nodes stop a trial whose actor died; waits until its ranks are gone."""
        import ray

        names = [seat.node for seat in seats if seat.node in self._agents]
        stopping = [self._agents[name][1].cancel.remote(number) for name in names]
        if stopping:
            ray.wait(stopping, num_returns=len(stopping), timeout=_CANCEL_TIMEOUT_S)

    def tend(self) -> None:
        """Look for nodes now and then, while there are fewer than wanted."""
        if len(self._agents) < self._wanted and time.monotonic() - self._looked > _LOOK_EVERY_S:
            self.refresh()

    def close(self) -> None:
        """End all agents, and so every process they started."""
        for name in list(self._agents):
            self._drop(name)

    def _take_in(self, nodes: Sequence[RayNode]) -> None:
        import ray

        starting = {}
        for node in nodes:
            self._agents[node.name] = self._start(node)
            self._nodes[node.name] = node
            starting[self._agents[node.name][1].ready.remote()] = node
        ready, late = ray.wait(list(starting), num_returns=len(starting), timeout=_START_TIMEOUT_S)
        for reference in late:
            self._set_aside(starting[reference].name, "the tuner's process did not start there")
        answered = [starting[reference] for reference in ready if _answered(reference)]
        for node in starting.values():
            if node not in answered:
                self._drop(node.name)  # it may come back, or have died while the agent started
        healthy = self._checked(answered)
        for node in healthy:
            self.ledger.add(Node(node.name, self._devices, node.domain))

    def _start(self, node: RayNode) -> tuple[str, Any]:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        from tuner.cluster.node_agent import THREADS, NodeAgent

        self._started += 1
        name = f"tuner-{self._study_id[:12]}-agent-{self._started}"
        on_gpu = self._device == "cuda"
        actor = ray.remote(NodeAgent).options(
            name=name,
            num_cpus=0 if on_gpu else self._devices,
            num_gpus=self._devices if on_gpu else 0,
            max_concurrency=THREADS,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node.ray_id, soft=False),
        )
        return name, actor.remote(self._trainable, self._device)

    def _checked(self, nodes: Sequence[RayNode]) -> list[RayNode]:
        """Those of the nodes that pass the health check; the others are set aside."""
        if not self._health_check or not nodes:
            return list(nodes)
        import ray

        references = {
            self._agents[node.name][1].check.remote(
                self._devices, str(self._folder / node.name.replace("/", "_"))
            ): node
            for node in nodes
        }
        ray.wait(list(references), num_returns=len(references), timeout=_CHECK_TIMEOUT_S)
        rates: dict[str, Mapping[str, float]] = {}
        for reference, node in references.items():
            result = _health(reference)
            if result.outcome is Outcome.COMPLETED:
                rates[node.name] = result.evidence["health"]
            else:
                self._set_aside(node.name, f"health check {result.outcome}: {result.reason}")
        for name, reason in slow_nodes(rates, _SLOW_SHARE[self._device]).items():
            self._set_aside(name, reason)
        return [node for node in nodes if node.name in self._agents]

    def _set_aside(self, name: str, reason: str) -> None:
        self.quarantined[name] = reason
        _LOG.warning("node %s is not used: %s", name, reason)
        self._drop(name)

    def _drop(self, name: str) -> None:
        import ray

        self.ledger.remove(name)
        agent = self._agents.pop(name, None)
        if agent is not None:
            ray.kill(agent[1])


def slow_nodes(rates: Mapping[str, Mapping[str, float]], share: float) -> dict[str, str]:
    """Nodes whose rate in some test is below `share` of the median node's, with the reason."""
    slow: dict[str, str] = {}
    for test in sorted({test for found in rates.values() for test in found}):
        values = {name: found[test] for name, found in rates.items() if test in found}
        middle = statistics.median(values.values())
        for name, value in values.items():
            if value < share * middle and name not in slow:
                slow[name] = f"slow: {test} is {value:.4g}, the median node's {middle:.4g}"
    return slow


def _answered(reference: Any) -> bool:
    """Whether a call of an agent came back in time."""
    import ray

    try:
        ray.get(reference, timeout=_START_TIMEOUT_S)
    except ray.exceptions.RayError:
        return False
    return True


def _health(reference: Any) -> TrialResult:
    import ray

    try:
        return TrialResult.from_json(ray.get(reference, timeout=0))
    except ray.exceptions.GetTimeoutError:
        return TrialResult(Outcome.TIMEOUT, f"no answer within {_CHECK_TIMEOUT_S:g} s")
    except ray.exceptions.RayError as error:
        return TrialResult(Outcome.NODE_LOST, str(error).splitlines()[0])


def ray_nodes(device: str, devices: int) -> list[RayNode]:
    """Nodes of the running Ray cluster with enough devices, in order of name.

    The label `nvlink-domain` tells which nodes share an NVLink domain; without it each node is one.
    """
    import ray

    resource = "CPU" if device == "cpu" else "GPU"
    found = []
    for node in ray.nodes():
        if node.get("Alive", False) and node["Resources"].get(resource, 0.0) >= devices:
            name = f"{node.get('NodeManagerHostname', 'node')}-{node['NodeID'][:6]}"
            domain = (node.get("Labels") or {}).get("nvlink-domain", name)
            found.append(RayNode(node["NodeID"], name, node["NodeManagerAddress"], domain))
    return sorted(found, key=lambda node: node.name)
