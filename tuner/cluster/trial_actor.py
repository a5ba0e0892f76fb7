"""The Ray Tune trainable: runs one trial's processes on the nodes of its placement group.

The actor holds no state between trials, so Ray may reuse it; every trial runs in processes of its
own, started on each node by that node's launcher. The result always comes back as a `TrialResult`,
never as an exception.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ray import tune

from tuner.measurement import Outcome, TrialResult, TrialSpec, write_json_atomically

RESULT_KEY = "trial_result"


class TrialActor(tune.Trainable):
    """One trial: `config` holds the spec, the trainable's name, the node ranks and the folder."""

    def setup(self, config: dict[str, Any]) -> None:
        self._config = config

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        self._config = new_config
        return True

    def step(self) -> dict[str, Any]:
        started = time.monotonic()
        try:
            result = run_on_placement(self._config)
        except Exception as error:
            # Launch itself failed (a node's disk is full, say): still an outcome of this trial.
            result = TrialResult(
                Outcome.CRASHED,
                f"launch failed: {type(error).__name__}: {error}",
                duration_s=time.monotonic() - started,
            )
        # As text: Tune flattens nested results, and the searcher would get it in pieces.
        return {RESULT_KEY: json.dumps(result.to_json()), "done": True}

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Trials are not checkpointed: one that is cut short is run again."""

    def load_checkpoint(self, checkpoint: object) -> None:
        """See `save_checkpoint`."""


def run_on_placement(config: Mapping[str, Any]) -> TrialResult:
    """Run the trial on every node of the current placement group; the first node's result."""
    ranks = config["ranks_per_node"]
    if len(ranks) == 1:
        return run_on_node(config, 0, "127.0.0.1", None)
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    group = ray.util.get_current_placement_group()
    assert group is not None  # Ray Tune starts every trial in one
    address, port = ray.util.get_node_ip_address(), _free_port()
    remote = ray.remote(run_on_node)
    others = [
        remote.options(
            num_cpus=bundle["CPU"],
            num_gpus=bundle.get("GPU", 0),
            max_retries=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                placement_group=group, placement_group_bundle_index=node_rank
            ),
        ).remote(config, node_rank, address, port)
        for node_rank, bundle in enumerate(group.bundle_specs)
        if node_rank > 0
    ]
    result = run_on_node(config, 0, address, port)
    results = [result, *_collect(others)]
    failed = [r for r in results if r.outcome is not Outcome.COMPLETED]
    return failed[0] if failed else result


def run_on_node(
    config: Mapping[str, Any], node_rank: int, master_addr: str, master_port: int | None
) -> TrialResult:
    """Run this node's ranks of a trial; its folder then holds logs and `result.json`."""
    import trainables

    output_dir = Path(config["output_dir"])
    output_dir.mkdir(parents=True, exist_ok=True)
    spec = TrialSpec.from_json(config["spec"])
    if node_rank == 0:
        write_json_atomically(output_dir / "spec.json", spec.to_json())
    return trainables.get(config["trainable"]).run_trial(
        spec,
        output_dir,
        node_rank=node_rank,
        nnodes=len(config["ranks_per_node"]),
        master_addr=master_addr,
        master_port=master_port,
    )


def _collect(references: list[Any]) -> list[TrialResult]:
    import ray

    results = []
    for reference in references:
        try:
            results.append(ray.get(reference, timeout=60))
        except Exception as error:
            results.append(TrialResult(Outcome.CRASHED, f"a node's launcher was lost: {error}"))
    return results


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("", 0))
        return int(listener.getsockname()[1])
