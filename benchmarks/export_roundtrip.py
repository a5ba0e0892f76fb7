"""How exactly exports arrive in the real packages, over random valid candidates.

    python benchmarks/export_roundtrip.py --n 2000

Each candidate is exported, applied to the real Megatron-LM parser with its checks and configuration
objects, or laid over a real Megatron Bridge container by Bridge's own override code, and every
field is compared; what the tuner reads back from its own export is compared too. Megatron-LM's
parser is in the wheels from 0.17 on; for 0.16.1 give a checkout with --megatron-lm-checkout.
Prints one JSON summary.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "oracle")]

from constraint_oracle import wheels  # noqa: E402
from export_oracle.client import training_folder, worker  # noqa: E402
from export_oracle.roundtrip import (  # noqa: E402
    BRIDGE_FORMATS,
    Outcome,
    through_bridge,
    through_megatron_lm,
    valid_candidates,
)

FORMATS = ("megatron-args", *BRIDGE_FORMATS)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the summary; 0 when every field arrived, 1 otherwise, 3 without wheels."""
    options = _options(arguments)
    results: dict[str, Any] = {}
    for mcore, to in itertools.product(options.mcore, options.to):
        started = time.perf_counter()
        try:
            outcome = run(mcore, to, options)
        except wheels.WheelUnavailableError as missing:
            print(missing, file=sys.stderr)
            return 3
        name = f"{mcore} {to}"
        if outcome is None:
            results[name] = {"skipped": "the wheel has no argument parser; give a checkout"}
            continue
        seconds = round(time.perf_counter() - started, 1)
        results[name] = outcome.to_json() | {"seconds": seconds}
        print(f"{name}: {json.dumps(results[name])}", file=sys.stderr, flush=True)
        for wrong in (*outcome.wrong[:3], *outcome.refused[:3]):
            print(f"  {wrong[1:]}", file=sys.stderr)
    exact = all(
        not row.get("fields_wrong") and not row.get("candidates_refused_upstream")
        for row in results.values()
    )
    summary = {"exact": exact, "seed": options.seed, "results": results, "command": _command()}
    print(json.dumps(summary, indent=1))
    return 0 if exact else 1


def run(mcore: str, to: str, options: argparse.Namespace) -> Outcome | None:
    """One version and form; None where its parser is not at hand."""
    total = Outcome()
    frontend = "megatron-lm" if to == "megatron-args" else "bridge"
    training = None
    if frontend == "megatron-lm":
        training = training_folder(mcore, options.megatron_lm_checkout)
        if training is None:
            return None
    candidates = valid_candidates(options.seed, mcore, frontend)
    with worker(mcore, training) as ask:
        for flat, rewrites in itertools.islice(candidates, options.n):
            if frontend == "megatron-lm":
                total.add(through_megatron_lm(ask, flat, rewrites, mcore))
            else:
                total.add(through_bridge(ask, flat, rewrites, mcore, to))
    return total


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--n", type=int, default=2000, help="candidates per version and form")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--mcore", nargs="+", default=list(wheels.MCORE_VERSIONS))
    parser.add_argument("--to", nargs="+", default=list(FORMATS), choices=FORMATS)
    parser.add_argument("--megatron-lm-checkout", type=Path, help="Megatron-LM of core_v0.16.1")
    return parser.parse_args(arguments)


def _command() -> str:
    return shlex.join(["python", "benchmarks/export_roundtrip.py", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
