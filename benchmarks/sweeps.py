"""Recorded landscapes: every candidate of a space with what a run of it gave, and the tuner's
estimates of them.

Layout sweeps in the published schema (Hagemann et al. 2023) are one landscape for each model,
sequence length and number of GPUs. Their estimates are those of the tuner: memory from a dry run of
the framework that made the sweeps, step time from its kernels under the time model's starting
rates. Estimates are kept on disk, since a dry run takes seconds.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tuner.candidate import Candidate
from tuner.cluster.proposals import Proposals
from tuner.measurement import Measurement, Outcome, RankMeasurement, TrialResult
from tuner.search.estimates import Estimates
from tuner.search.space import SearchSpace, parse_space
from tuner.validation.hagemann import hagemann_launch
from tuner.validation.launch import UnmodelledError
from tuner.validation.published import read_rows, source_of

_KERNEL = "attention_kernel"  # the sweeps' axis of attention and norm kernels
_NEAR = (0.75, 1.3)  # rough fill of the GPU within which a run is dry-run in full
_TIME_PARTS = ("compute", "tensor", "host", "bubble", "pipeline", "gradients", "optimizer", "step")


@dataclass(frozen=True)
class Landscape:
    """Candidates in order, what each run gave (None: out of memory), and their estimates.

    `proposals` makes those of a study in a folder, where they are more than an engine on the
    estimates: what refines these by trials.
    """

    name: str
    space: SearchSpace
    candidates: tuple[Candidate, ...]
    step_times_s: tuple[float | None, ...]
    estimates: Estimates
    limit_bytes: float
    gpus: int
    proposals: Callable[[Path], Proposals] | None = None

    @property
    def best_s(self) -> float:
        """The shortest measured step."""
        return min(seconds for seconds in self.step_times_s if seconds is not None)

    def result(self, candidate: Candidate) -> TrialResult:
        """What a trial of the candidate gives."""
        seconds = self.step_times_s[self.position[candidate.key]]
        if seconds is None:
            return TrialResult(Outcome.OOM, "out of memory in the recorded run")
        rate = self.best_s / seconds
        measured = Measurement(
            step_time_s=seconds,
            step_time_spread_s=0.0,
            tokens_per_s_per_gpu=rate,
            tflops_per_gpu=rate,
            peak_memory_allocated_bytes=0,
            peak_memory_reserved_bytes=None,
            losses=(),
            step_times_s=(seconds,),
            ranks=(RankMeasurement(0, seconds, 0),),
        )
        return TrialResult(Outcome.COMPLETED, "", measured, seconds)

    @property
    def position(self) -> dict[str, int]:
        return {candidate.key: place for place, candidate in enumerate(self.candidates)}

    def estimate(self, candidates: Sequence[Candidate]) -> Estimates:
        """The estimates of these candidates, as an `Estimator` gives them."""
        rows = [self.position[candidate.key] for candidate in candidates]
        known = self.estimates
        return Estimates(
            known.step_time_s[rows],
            known.memory_bytes[rows],
            {name: values[rows] for name, values in known.time_parts.items()},
            {name: values[rows] for name, values in known.memory_parts.items()},
        )


def read_landscapes(path: Path, jobs: int) -> tuple[list[Landscape], list[dict[str, str]]]:
    """The layout sweeps in a file of published rows, and the rows that cannot be used."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    skipped = []
    for row in read_rows(path):
        if source_of(row) != "aleph":
            continue
        try:
            launch = hagemann_launch(row)
        except UnmodelledError as error:
            skipped.append({"id": row["id"], "reason": str(error)})
            continue
        key = (row["model"], row["seq_length"], row["num_gpus"])
        groups.setdefault(key, []).append({"row": row, "launch": launch.to_json()})
    answers = _estimated([one["launch"] for group in groups.values() for one in group], jobs)
    landscapes = [_landscape(key, group, answers) for key, group in groups.items()]
    return [one for one in landscapes if any(one.step_times_s)], skipped


def _landscape(
    key: tuple[Any, ...], group: Sequence[Mapping[str, Any]], answers: Mapping[str, Any]
) -> Landscape:
    found: dict[Candidate, tuple[float | None, dict[str, Any]]] = {}
    for one in group:
        row, measured = one["row"], one["row"]["measured"]
        milliseconds = None if measured.get("oom") else measured["step_time_ms"]
        seconds = None if milliseconds is None else milliseconds / 1e3
        found.setdefault(_candidate(row), (seconds, answers[_name(one["launch"])]))
    estimates = [answer for _, answer in found.values()]
    parts = {name: np.array([e["time"].get(name, 0.0) for e in estimates]) for name in _TIME_PARTS}
    kinds = sorted({kind for e in estimates for kind in e["memory"]})
    memory = {
        kind: np.array([float(e["memory"].get(kind, 0)) for e in estimates]) for kind in kinds
    }
    fixed = np.array([e["fixed_bytes"] for e in estimates], dtype=float)
    model, sequence, gpus = key
    return Landscape(
        name=f"{model}, sequence {sequence}, {gpus} GPUs",
        space=_space(list(found)),
        candidates=tuple(found),
        step_times_s=tuple(seconds for seconds, _ in found.values()),
        estimates=Estimates(
            np.sum(list(parts.values()), axis=0),
            np.array([e["peak_bytes"] for e in estimates], dtype=float) + fixed - fixed.min(),
            parts,
            memory,
        ),
        limit_bytes=float(estimates[0]["usable_bytes"] - fixed.min()),
        gpus=gpus,
    )


def _candidate(row: Mapping[str, Any]) -> Candidate:
    launch = hagemann_launch(row)
    flat = {**launch.config, _KERNEL: (row.get("extra_config") or {}).get("kernel")}
    flat.pop("grad_reduce_in_fp32", None)
    if launch.framework is not None and launch.framework["checkpoint_layers"]:
        flat |= {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }
    return Candidate.from_flat(flat)


def _space(candidates: Sequence[Candidate]) -> SearchSpace:
    full = {"recompute_granularity": "full"}
    names = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "micro_batch_size")
    axes: dict[str, Any] = {
        name: sorted({getattr(candidate, name) for candidate in candidates}) for name in names
    }
    axes["sequence_parallel"] = sorted({candidate.sequence_parallel for candidate in candidates})
    axes[_KERNEL] = sorted({dict(candidate.extra)[_KERNEL] for candidate in candidates})
    axes["recompute_granularity"] = sorted(
        {candidate.recompute_granularity for candidate in candidates}, key=str
    )
    axes["recompute_method"] = {"values": ["uniform"], "when": full}
    axes["recompute_num_layers"] = {"values": [1], "when": full}
    fixed = {"use_distributed_optimizer": True}
    if "full" not in axes["recompute_granularity"]:
        del axes["recompute_method"], axes["recompute_num_layers"]
    return parse_space({"axes": axes, "fixed": fixed}, where="landscape")


def _estimated(launches: Sequence[Mapping[str, Any]], jobs: int) -> dict[str, Any]:
    """The estimate of each launch by `_name`; those not on disk are made, `jobs` at a time."""
    from tuner.memory.composition.measure import cache_folder

    folder = cache_folder() / "sweeps"
    folder.mkdir(parents=True, exist_ok=True)
    distinct = {_name(launch): launch for launch in launches}
    missing = [n for n in distinct if not (folder / f"{n}.json").exists()]
    with ProcessPoolExecutor(max_workers=jobs) as pool:
        # Neighbours share kernels: each process takes whole stretches.
        pool_of = pool.map(
            estimate_to_file,
            [distinct[n] for n in missing],
            [str(folder / f"{n}.json") for n in missing],
            chunksize=8,
        )
        list(pool_of)
    return {n: json.loads((folder / f"{n}.json").read_text()) for n in distinct}


def _name(launch: Mapping[str, Any]) -> str:
    text = json.dumps([launch, _software()], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _software() -> str:
    """What estimates depend on besides the launch."""
    import tuner.validation.scaling as scaling
    from tuner.memory.composition import ProfileSource
    from tuner.memory.composition.measure import profile_task
    from tuner.models import get_model
    from tuner.timing.calibration import starting_rates

    code = hashlib.sha256()
    for path in sorted(Path(str(scaling.__file__)).parent.glob("*.py")):
        code.update(path.read_bytes())
    task = profile_task(get_model("tiny-dense"), Candidate.from_flat({}), ProfileSource(128))
    return f"{task.key} {code.hexdigest()} {starting_rates()}"


def estimate_to_file(launch: Mapping[str, Any], path: str) -> None:
    """Estimate one launch and keep the answer."""
    from tuner.estimation import EstimateRequest
    from tuner.measurement import write_json_atomically
    from tuner.memory.categories import breakdown_at
    from tuner.memory.dryrun import BLOCK_BYTES
    from tuner.memory.fixed_costs import fixed_costs
    from tuner.timing.calibration import starting_rates
    from tuner.timing.topology import Links
    from tuner.validation.scaling import ScalingRun
    from tuner.validation.scaling.run import record_rank
    from tuner.validation.scaling.timing import rough_peak_bytes, step_parts

    request = EstimateRequest.from_document(launch)
    run, gpu = ScalingRun(**launch["framework"]), request.gpu
    fixed = fixed_costs(request.candidate, gpu=gpu, world_size=request.world_size)
    rough = rough_peak_bytes(run, gpu.architecture)
    fill = rough / (gpu.usable_memory_bytes - fixed.total_bytes)
    peak, memory = int(rough), {"roughly": int(rough)}
    near = _NEAR[0] <= fill <= _NEAR[1]
    for stage in sorted({0, run.stages - 1}) if near else ():
        peak = peak if stage else 0
        trace = record_rank(run, stage, gpu.architecture)
        live = trace.live_bytes(BLOCK_BYTES)
        if int(live.max()) > peak:
            peak = int(live.max())
            memory = {k: int(v) for k, v in breakdown_at(trace, int(live.argmax())).items()}
    parts = step_parts(
        run,
        gpu=gpu,
        links=Links.of(gpu),
        rates=starting_rates(),
        global_batch_size=request.global_batch_size,
    )
    answer = {
        "peak_bytes": peak,
        "fixed_bytes": fixed.total_bytes,
        "usable_bytes": gpu.usable_memory_bytes,
        "memory": memory,
        "time": dict(parts),
    }
    write_json_atomically(Path(path), answer)
