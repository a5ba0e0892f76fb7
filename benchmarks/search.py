"""How many real trials a search needs on recorded landscapes, by sampler.

    python benchmarks/search.py --seeds 20 --plot regret.png

Every candidate of a landscape has been run before, so a search can be replayed: a sampler proposes,
the recorded outcome is told. Prints one JSON summary: for each landscape and sampler the median
number of trials until one is within 1 % and within 3 % of the best measured step time, the launches
wasted on out of memory until then, and the median regret after each trial. `--data` takes other
layout sweeps in the published schema, `--cpu` what `benchmarks/cpu_landscape.py` recorded.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from cpu_landscape import DATA as CPU_DATA
from cpu_landscape import read_cpu_landscape
from sweeps import Landscape, read_landscapes

from tuner.candidate import Candidate
from tuner.cluster.proposals import Proposals
from tuner.search.engine import Engine, TrialCosts
from tuner.search.records import Rejection
from tuner.search.samplers import RESIDUAL
from tuner.search.study import open_study

DATA = Path(__file__).parent / "data" / "published_memory.jsonl.gz"
SAMPLERS = (RESIDUAL, "random", "tpe")


@dataclass(frozen=True)
class Replay:
    """One search: regret (over the best step time) and launches wasted after each trial."""

    regret: tuple[float, ...]
    wasted: tuple[int, ...]

    def trials_within(self, margin: float) -> int:
        """Trials until the best so far is this near the best; one more than were run if never."""
        reached = (trial for trial, r in enumerate(self.regret, 1) if r <= margin)
        return next(reached, len(self.regret) + 1)

    def wasted_within(self, margin: float) -> int:
        """Launches that ran out of memory until then."""
        return self.wasted[min(self.trials_within(margin), len(self.wasted)) - 1]


def replay(landscape: Landscape, sampler: str, seed: int, trials: int) -> Replay:
    """Search a landscape until it is exhausted, `trials` are run, or the best is found."""
    with TemporaryDirectory() as folder:
        proposals = Proposals(None)
        if sampler == RESIDUAL:
            proposals = (landscape.proposals or _plain(landscape))(Path(folder))
        return _replayed(landscape, sampler, seed, trials, proposals)


def _plain(landscape: Landscape) -> Callable[[Path], Proposals]:
    """An engine on the estimates of a landscape, which no trial refines."""

    def proposals(folder: Path) -> Proposals:
        engine = Engine(
            landscape.candidates,
            landscape.estimate,
            limit_bytes=landscape.limit_bytes,
            costs=TrialCosts(lambda candidate: landscape.gpus),
        )
        return Proposals(engine)

    return proposals


def _replayed(
    landscape: Landscape, sampler: str, seed: int, trials: int, proposals: Proposals
) -> Replay:
    position = landscape.position

    def check(candidate: Candidate) -> Rejection | None:
        there = candidate.key in position
        return None if there else Rejection("landscape", "was not among the recorded runs")

    study = open_study(
        "",
        "replay",
        landscape.space,
        check,
        metric="tflops_per_gpu",
        memory_limit_bytes=int(landscape.limit_bytes),
        sampler=sampler,
        seed=seed,
        engine=proposals.engine,
    )
    regret, wasted, best = [], [], float("inf")
    for _ in range(trials):
        proposal = study.ask()
        if proposal is None:
            break
        result = landscape.result(proposal.candidate)
        study.tell(proposal.number, result)
        proposals.learn(study.records())
        if result.measurement is None:
            wasted.append((wasted[-1] if wasted else 0) + 1)
        else:
            wasted.append(wasted[-1] if wasted else 0)
            best = min(best, result.measurement.step_time_s)
        regret.append(best / landscape.best_s - 1.0)
        if regret[-1] <= 0:
            break
    return Replay(tuple(regret), tuple(wasted))


def summarised(replays: Sequence[Replay]) -> dict[str, Any]:
    """Medians over seeds."""
    summary: dict[str, Any] = {}
    for margin in (0.01, 0.03):
        name = f"within_{margin:.0%}".replace("%", "pct")
        trials = [one.trials_within(margin) for one in replays]
        wasted = [one.wasted_within(margin) for one in replays]
        summary[name] = {
            "median_trials": statistics.median(trials),
            "worst_trials": max(trials),
            "median_wasted": statistics.median(wasted),
            "worst_wasted": max(wasted),
        }
    longest = max(len(one.regret) for one in replays)
    medians = [
        statistics.median(one.regret[min(t, len(one.regret) - 1)] for one in replays)
        for t in range(min(longest, 40))
    ]
    summary["median_regret"] = [None if m == float("inf") else round(m, 4) for m in medians]
    return summary


def estimate_errors(landscape: Landscape) -> dict[str, float]:
    """How good the estimates are before any trial: rank correlation of step times, and fit."""
    import numpy as np
    from scipy.stats import spearmanr

    ran = [i for i, s in enumerate(landscape.step_times_s) if s is not None]
    predicted = landscape.estimates.step_time_s[ran]
    measured = np.array([landscape.step_times_s[i] for i in ran], dtype=float)
    fits = landscape.estimates.memory_bytes <= landscape.limit_bytes
    really = np.array([s is not None for s in landscape.step_times_s])
    return {
        "rank_correlation": round(float(spearmanr(predicted, measured)[0]), 4),
        "false_oom": int((~fits & really).sum()),
        "missed_oom": int((fits & ~really).sum()),
    }


def plot(results: Mapping[str, Any], path: Path) -> None:
    """Median regret curves of every landscape."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4 * len(results), 3.5), layout="constrained")
    panels = figure.subplots(1, len(results), squeeze=False)[0]
    for panel, (name, result) in zip(panels, results.items(), strict=True):
        for sampler, summary in result["samplers"].items():
            curve = summary["median_regret"]
            finite = [(t, r) for t, r in enumerate(curve, 1) if r is not None]
            panel.plot(*zip(*finite, strict=True), label=sampler)
        panel.set(title=name, xlabel="trials", ylabel="median regret", yscale="symlog")
        panel.set_ylim(0, 2)
    panels[0].legend()
    figure.savefig(path)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--cpu", type=Path, default=CPU_DATA, help="landscape run on a CPU")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--trials", type=int, default=200, help="most trials of one search")
    parser.add_argument("--samplers", nargs="+", default=SAMPLERS)
    parser.add_argument("--jobs", type=int, default=2, help="dry runs at a time")
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args(arguments)
    landscapes, skipped = read_landscapes(options.data, options.jobs)
    if options.cpu.exists():
        landscapes.append(read_cpu_landscape(options.cpu))
    results: dict[str, Any] = {}
    for landscape in landscapes:
        samplers = {}
        for sampler in options.samplers:
            replays = [
                replay(landscape, sampler, seed, options.trials) for seed in range(options.seeds)
            ]
            samplers[sampler] = summarised(replays)
            print(f"{landscape.name}: {sampler} done", file=sys.stderr)
        results[landscape.name] = {
            "candidates": len(landscape.candidates),
            "out_of_memory": sum(s is None for s in landscape.step_times_s),
            "estimates": estimate_errors(landscape),
            "samplers": samplers,
        }
    if options.plot:
        plot(results, options.plot)
    command = shlex.join(["python", "benchmarks/search.py", *(arguments or sys.argv[1:])])
    print(
        json.dumps(
            {"landscapes": results, "skipped": skipped, "seeds": options.seeds, "command": command},
            indent=1,
            allow_nan=False,
        )
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
