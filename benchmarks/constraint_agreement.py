"""How often the constraint rules agree with the real packages on fresh random candidates.

    python benchmarks/constraint_agreement.py --n 20000 --seed 1

Fetches the wheels of every supported version with pip when they are not cached, asks them about
seeded random candidates and prints one JSON summary: agreement per version and front end, minimised
disagreements, and which error rules the candidates triggered.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "oracle")]

from constraint_oracle import wheels  # noqa: E402
from constraint_oracle.agreement import Agreement, compare, describe, tuner_judge  # noqa: E402
from constraint_oracle.client import FRONTENDS, Oracle  # noqa: E402
from constraint_oracle.generator import CandidateGenerator, Weights  # noqa: E402

BATCH = 2000


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the summary; 0 when both agree on every candidate, 1 otherwise, 3 without wheels."""
    options = _options(arguments)
    weights = Weights(mutations=tuple(options.mutations))
    outcomes, seconds = [], {}
    for mcore in options.mcore:
        for frontend in options.frontend:
            started = time.perf_counter()
            try:
                outcomes.append(run(mcore, frontend, options.n, options.seed, weights))
            except wheels.WheelUnavailableError as missing:
                print(missing, file=sys.stderr)
                return 3
            seconds[f"{mcore} {frontend}"] = round(time.perf_counter() - started, 1)
            print(f"{mcore} {frontend}: {outcomes[-1].rate:.4%}", file=sys.stderr, flush=True)
    print(json.dumps(summary(outcomes) | {"seconds": seconds, "command": _command()}, indent=1))
    return int(any(one.disagreeing for one in outcomes))


def run(mcore: str, frontend: str, count: int, seed: int, weights: Weights) -> Agreement:
    """Agreement over ``count`` candidates, asked in batches that bound the memory."""
    judge = tuner_judge(mcore, frontend)
    generator = CandidateGenerator(seed, mcore, frontend, weights)
    total = Agreement(mcore, frontend)
    with Oracle(mcore, frontend) as oracle:
        while total.candidates < count:
            size = min(BATCH, count - total.candidates)
            configs = [generator.draw() for _ in range(size)]
            part = compare(oracle, judge, configs, oracle.ask(configs))
            if part.disagreeing:
                print(describe(part), file=sys.stderr, flush=True)
            total.candidates += part.candidates
            total.valid += part.valid
            total.disagreeing += part.disagreeing
            total.excepted += part.excepted
            total.disagreements += part.disagreements
            total.errors_triggered += part.errors_triggered
    return total


def summary(outcomes: Sequence[Agreement]) -> dict[str, Any]:
    """The JSON document: one entry per version and front end, and the rules over all of them."""
    triggered = {rule for one in outcomes for rule in one.errors_triggered}
    declared = {rule for one in outcomes for rule in error_rules(one.mcore, one.frontend)}
    return {
        "agreement": [
            {
                "mcore": one.mcore,
                "frontend": one.frontend,
                "candidates": one.candidates,
                "valid_fraction": round(one.valid / max(1, one.candidates), 4),
                "agreement": one.rate,
                "excepted": one.excepted,
                "disagreements": [asdict(two) for two in one.disagreements],
            }
            for one in outcomes
        ],
        "error_rules": len(declared),
        "error_rules_triggered": sorted(triggered & declared),
        "error_rules_never_triggered": sorted(declared - triggered),
    }


def error_rules(mcore: str, frontend: str) -> set[str]:
    """Ids of the error rules that hold for one version and front end."""
    from tuner.constraints.registry import rules_for

    return {one.id for one in rules_for(mcore, frontend) if one.kind == "error"}


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--n", type=int, default=20000, help="candidates per version and front end")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--mcore", nargs="+", default=list(wheels.MCORE_VERSIONS))
    parser.add_argument("--frontend", nargs="+", default=list(FRONTENDS), choices=FRONTENDS)
    parser.add_argument(
        "--mutations",
        nargs="+",
        type=float,
        default=list(Weights().mutations),
        help="weights of 0, 1, 2, ... random changes per candidate",
    )
    return parser.parse_args(arguments)


def _command() -> str:
    return shlex.join(["python", "benchmarks/constraint_agreement.py", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
