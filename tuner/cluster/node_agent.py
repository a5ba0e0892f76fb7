"""The study's process on one node: runs trials there, keeps a warm template, checks the node.

A Ray actor that holds the node's GPUs (or CPUs) for as long as the study runs. When it dies, by
whatever signal, its trials die with it; when the driver dies, Ray ends it.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tuner.measurement import Outcome, TrialResult, TrialSpec

if TYPE_CHECKING:
    from trainables.warm import Template

THREADS = 128
"""Calls served at once; a node of that many one-GPU trials is not built."""

_HEALTH_TIMEOUT_S = 120.0
_CANCEL_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class _Call:
    """A trial's latest run on this node."""

    cancel: threading.Event = field(default_factory=threading.Event)
    ended: threading.Event = field(default_factory=threading.Event)


class NodeAgent:
    """Runs the trials of one trainable on this node. Methods may run at the same time."""

    def __init__(self, trainable: str, device: str) -> None:
        import os

        self._trainable, self._device = trainable, device
        self._visible = os.environ.get("CUDA_VISIBLE_DEVICES") or None
        self._calls: dict[int, _Call] = {}
        self._template = self._make_template()

    def ready(self) -> dict[str, Any]:
        """Answered once the actor lives: who and where it is."""
        import os

        return {"host": socket.gethostname(), "pid": os.getpid()}

    def free_port(self) -> int:
        """A port that was free a moment ago, for ranks of several nodes to meet at."""
        from trainables.processes import free_port

        return free_port()

    def run(
        self, config: Mapping[str, Any], node_rank: int, master_addr: str, master_port: int | None
    ) -> dict[str, Any]:
        """Run this node's ranks of a trial; the result's JSON form, also where launching failed."""
        call = self._calls[config["number"]] = _Call()
        try:
            result = self._run(config, node_rank, master_addr, master_port, call.cancel)
        except OSError as error:
            from trainables.failures import describe_exception, kind_of_failure

            text = describe_exception(error)
            result = TrialResult(kind_of_failure(text), f"launch failed: {text}")
        finally:
            call.ended.set()
        return result.to_json()

    def cancel(self, number: int) -> None:
        """Stop a trial's ranks here, and return once they are gone."""
        call = self._calls.get(number)
        if call is not None:
            call.cancel.set()
            call.ended.wait(_CANCEL_TIMEOUT_S)

    def check(self, devices: int, folder: str) -> dict[str, Any]:
        """Run the health check on all devices of the node; a result's JSON form."""
        from trainables.launch import run_trial

        spec = TrialSpec(
            model={},
            config={},
            world_size=devices,
            seq_length=1,
            global_batch_size=1,
            device=self._device,
            timeout_s=_HEALTH_TIMEOUT_S,
        )
        try:
            result = run_trial(
                spec,
                Path(folder),
                module="trainables.health",
                template=self._template,
                devices=self._devices(range(devices)),
            )
        except OSError as error:
            result = TrialResult(Outcome.CRASHED, f"{type(error).__name__}: {error}")
        return result.to_json()

    def _run(
        self,
        config: Mapping[str, Any],
        node_rank: int,
        master_addr: str,
        master_port: int | None,
        cancel: threading.Event,
    ) -> TrialResult:
        import trainables

        seats = config["seats"]
        output_dir = Path(config["output_dir"])
        if node_rank:
            output_dir = output_dir / f"node{node_rank}"
        return trainables.get(self._trainable).run_trial(
            TrialSpec.from_json(config["spec"]),
            output_dir,
            node_rank=node_rank,
            nnodes=len(seats),
            master_addr=master_addr,
            master_port=master_port,
            cancel=cancel,
            template=self._template,
            devices=self._devices(seats[node_rank]["devices"]),
        )

    def _devices(self, numbers: Sequence[int]) -> str | None:
        """CUDA_VISIBLE_DEVICES for some of the node's devices."""
        if self._device == "cpu":
            return None
        own = self._visible.split(",") if self._visible else None
        return ",".join(own[number] if own else str(number) for number in numbers)

    def _make_template(self) -> Template | None:
        import trainables

        module = trainables.get(self._trainable).preload
        if module is None:
            return None
        from trainables.launch import rank_environment
        from trainables.warm import Template, template_environment

        spec = TrialSpec({}, {}, 1, 1, 1, device=self._device)
        template = Template(module, self._device, template_environment(rank_environment(spec, 1)))
        template.start()
        return template
