"""Robustness on clusters: a simulated large one, chaos on real trials, and a trial's fixed cost.

    python benchmarks/cluster.py simulated --trials 1000
    python benchmarks/cluster.py chaos --trials 40
    python benchmarks/cluster.py outage --trials 50 --outage-s 600
    python benchmarks/cluster.py fixed_cost

`simulated`: 64 nodes of 8 GPUs, each an agent process, on one Ray node with fake GPU resources (64
raylets need more memory than a small machine has); trials of 1 to 256 GPUs that wait instead of
compute. `chaos`: real Megatron-Core trials on the CPU while ranks, launchers, agents and the driver
are killed or stopped and the MLflow server goes away. `outage`: simulated trials while the server
is away for minutes. `fixed_cost`: what a trial takes besides its
steps, started plainly and warm. Each prints one JSON summary.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))


def main() -> None:
    """Run one section and print its summary."""
    import cluster_chaos
    import cluster_fixed_cost
    import cluster_outage
    import cluster_simulated

    sections: dict[str, tuple[Callable[..., dict[str, Any]], int]] = {
        "simulated": (cluster_simulated.measure, 1000),
        "chaos": (cluster_chaos.measure, 40),
        "outage": (cluster_outage.measure, 50),
        "fixed_cost": (cluster_fixed_cost.measure, 5),
    }
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("section", choices=sections)
    parser.add_argument("--trials", type=int, help="trials to run")
    parser.add_argument("--outage-s", type=float, default=600.0, help="of the section outage")
    arguments = parser.parse_args()
    measure, trials = sections[arguments.section]
    more = {"outage_s": arguments.outage_s} if arguments.section == "outage" else {}
    with tempfile.TemporaryDirectory(prefix=f"cluster-{arguments.section}-") as folder:
        summary = measure(Path(folder), arguments.trials or trials, **more)
    command = "python benchmarks/cluster.py " + " ".join(sys.argv[1:])
    print(json.dumps({"command": command, **summary}, indent=2))


if __name__ == "__main__":
    main()
