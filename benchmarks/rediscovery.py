"""Whether a plan finds what NVIDIA tuned: published runs of Megatron Bridge against their spaces.

    python benchmarks/rediscovery.py --kept rediscovery.json
    python benchmarks/rediscovery.py --model LLAMA3 --kept rediscovery.json

One published run (high confidence, the newest of equals) for each model, GPU, number of GPUs,
precision, batch and sequence. Its space is the shipped one of its kind of model: parallel sizes,
micro-batch, recomputation, CUDA graphs, offload of layers and of the optimizer. What no axis names
(kernel fusions, overlaps, token dispatcher, sharding of weights, FP8 recipe) is fixed to what the
run had. Fully sharded weights and combined passes of two micro-batches are left out of the space,
since no profile has them: runs with them are judged by a full dry run. Expert tensor parallelism
and offload of modules are left out, context parallelism goes up to 4 (2 with experts): no run used
more, and profiles of every setting take the time.

For each run: whether its configuration is valid and fits, by the rules (of the Megatron-Core of its
release, or of a later one) and estimates of the plan;
how far above the predicted best its predicted step lies; the share of the candidates that fit which
are predicted to be faster, from a random draw of `DRAWN` of the space; and where the best is
faster by more than `FASTER`, what the difference is made of, in seconds and in settings. A run that
the axes of its space cannot say (`in_space`: uneven stages, sharded weights, combined passes) may
be predicted to be faster than anything in it: `above_best` is negative then.

`--kept FILE` keeps the answer of each run as it comes and goes on from there. Profiles are kept on
disk; the first pass over all runs takes hours on one core.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from tuner.candidate import Candidate
from tuner.cluster.prepared import PreparedJob, installed_mcore
from tuner.commands.estimate import estimate_document
from tuner.configuration import PRECISION_FIELDS, rule_fields
from tuner.constraints.fields import catalogue
from tuner.constraints.registry import BRIDGE_VERSIONS, resolve_version
from tuner.errors import InputError
from tuner.estimation import EstimateRequest
from tuner.job import parse_job
from tuner.memory.composition.measure import UNCOMPOSED
from tuner.memory.script import ATTENTION_MASK
from tuner.search.enumeration import factor_space
from tuner.search.layouts import with_layouts
from tuner.search.planning.estimator import OFFLOAD_FIELDS, SpaceEstimator
from tuner.search.planning.front import Ranked
from tuner.search.planning.machine import workplace_of
from tuner.search.planning.plan import plan_space
from tuner.search.planning.prior import listed
from tuner.search.planning.weighing import Figures, Scales
from tuner.search.validity import ValidityChecker
from tuner.timing.observations import observation_of
from tuner.validation.published import read_rows, source_of

DATA = Path(__file__).parent / "data" / "published_time.jsonl.gz"
SOURCE = "mbridge-perf"
RUN = ("model", "gpu", "num_gpus", "precision", "seq_length", "gbs", "task")
BEST_SHARE, NEAR_BEST = 0.03, 0.04
FASTER = 0.04
DRAWN = 2000
_OF_AXES = (
    "pipeline_model_parallel_layout",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "recompute_method",
    "recompute_num_layers",
    "recompute_modules",
    "cuda_graph_modules",
    "cuda_graph_scope",
    "sequence_parallel",
    "env",
)
"""Fields of a published run that follow from what the axes choose."""
_SPLITS = _OF_AXES[:5]
"""Those that split layers unevenly: balanced layouts are offered, not the run's own."""
_OF_UNCOMPOSED = ("data_parallel_sharding_strategy", "fsdp_double_buffer", "delay_wgrad_compute")
"""Fields that go with sharded weights or combined passes."""


@dataclass(frozen=True, slots=True)
class Rediscovered:
    """What became of one published run. Times are predicted seconds of a step.

    `reached` is None where the run could not be compared, with the reason in `note`.
    """

    id: str
    run: str
    valid: bool | None = None
    violations: tuple[str, ...] = ()
    fits: bool | None = None
    gib: float | None = None
    limit_gib: float | None = None
    in_space: bool | None = None
    feasible: int = 0
    published_s: float | None = None
    measured_s: float | None = None
    best_s: float | None = None
    above_best: float | None = None
    faster_share: float | None = None
    reached: bool | None = None
    why_faster: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""
    seconds: float = 0.0


def published_runs(rows: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """The newest row of each run; rows of a page stand newest first."""
    seen = set()
    for row in rows:
        key = tuple(str(row.get(name)) for name in RUN)
        if (
            source_of(row) == SOURCE
            and row.get("config_confidence") == "high"
            and row.get("task") != "lora"
            and key not in seen
        ):
            seen.add(key)
            yield row


def rediscover(row: Mapping[str, Any]) -> Rediscovered:
    """Plan the run of a row and find its configuration in the plan."""
    started = time.perf_counter()
    name = ", ".join(str(row[part]) for part in RUN)
    found: dict[str, Any] = {}
    try:
        observation = observation_of(row)
        request = EstimateRequest.from_document(_plain(observation.document))
        errors = _errors(row, request)
        found = {"valid": not errors, "violations": tuple(errors)}
        found |= _compared(_on_installed(request), observation.step_time_s)
    except InputError as error:
        found["note"] = str(error)
    return Rediscovered(
        id=row["id"], run=name, seconds=round(time.perf_counter() - started, 1), **found
    )


def _errors(row: Mapping[str, Any], request: EstimateRequest) -> list[str]:
    """The rules that the run breaks: none where a Megatron-Core from that of its release on takes
    it, else those of the newest."""
    named = re.search(r"release v0\.(\d+)", str(row.get("source_version")))
    later = [
        version
        for version, bridge in BRIDGE_VERSIONS.items()
        if named is None or int(bridge.split(".")[1]) >= int(named[1])
    ]
    errors: list[str] = []
    for version in later:
        broken = _checker(request, version).errors(request.candidate)
        errors = [f"{one.rule}: {one.message}" for one in broken]
        if not errors:
            break
    return errors


def _plain(document: Mapping[str, Any]) -> dict[str, Any]:
    """The document as a user's job has it: without what a job takes from the GPU's data, or what
    is a setting of the data loader.
    """
    config = {n: v for n, v in document["config"].items() if n != ATTENTION_MASK}
    return {n: v for n, v in document.items() if n != "link_domain_gpus"} | {"config": config}


def _on_installed(request: EstimateRequest) -> EstimateRequest:
    """The request without settings that the installed Megatron-Core does not have: its layers are
    profiled, and neither the run nor its space would be.
    """
    installed = installed_mcore()
    known = {*introspected(installed), *Candidate.__dataclass_fields__}
    flat = request.candidate.to_flat()
    kept = {name: value for name, value in flat.items() if name in known or name == "env"}
    return replace(request, candidate=Candidate.from_flat(kept))


def introspected(mcore: str) -> set[str]:
    """The fields of a version of Megatron-Core."""
    version = resolve_version(mcore)
    return {name for name, known in catalogue().items() if version in known.default}


def _checker(request: EstimateRequest, mcore: str) -> ValidityChecker:
    """The rules of a version for the run, as `tuner.cluster.prepared.prepare` sets them up."""
    fixed = {
        **rule_fields(request.model, mcore),
        **PRECISION_FIELDS["bf16"],
        "seq_length": request.seq_length,
        "global_batch_size": request.global_batch_size,
        "check_for_nan_in_loss": False,  # as scripts/performance of Megatron Bridge sets it
    }
    return ValidityChecker(fixed, request.world_size, mcore, "bridge")


def in_space(row: Mapping[str, Any]) -> bool:
    """Whether the axes of a run's space can say its layout, recomputation, graphs and offload."""
    try:
        document = _plain(observation_of(row).document)
        request = _on_installed(EstimateRequest.from_document(document))
        flat = request.candidate.to_flat()
        _prepared(request).space.labels(flat)
    except InputError:
        return False
    return not any(flat.get(name) for name in (*UNCOMPOSED, *_SPLITS))


def _prepared(request: EstimateRequest) -> PreparedJob:
    """The job of a run, ready to plan."""
    job = parse_job(_job(request), where="rediscovery")
    space = with_layouts(job.search_space(), request.model, request.seq_length)
    return PreparedJob(job, request.model, space, _checker(request, installed_mcore()))


def _job(request: EstimateRequest) -> dict[str, Any]:
    """A job that knows the run and none of the choices that the axes stand for."""
    experts = request.model.num_moe_experts is not None
    axes: dict[str, Any] = {
        "context_parallel_size": [1, 2] if experts else [1, 2, 4],
        "fine_grained_activation_offloading": None,
        "offload_modules": None,
        "env.PYTORCH_CUDA_ALLOC_CONF": None,
        "env.NCCL_GRAPH_REGISTER": None,
    }
    # An axis may depend on one that is left out.
    axes["cpu_offloading_num_layers"] = {
        "values": [1, 2, 4, 8, 16, *_more_layers(request)],
        "when": {"cpu_offloading": True},
    }
    if experts:
        axes["expert_tensor_parallel_size"] = [1]
    job = {
        "name": "rediscovery",
        "model": request.model.to_flat(),
        "cluster": {
            "gpu": request.gpu.name,
            "nodes": request.world_size // min(request.gpus_per_node, request.world_size),
            "gpus_per_node": min(request.gpus_per_node, request.world_size),
        },
        "workload": {
            "seq_length": request.seq_length,
            "global_batch_size": request.global_batch_size,
        },
        "space": {"includes": ["moe" if experts else "dense"], "axes": axes},
    }
    names = {axis.field for axis in parse_job(job, where="rediscovery").search_space().axes}
    flat = request.candidate.to_flat()
    chosen = {*names, *OFFLOAD_FIELDS, *_OF_AXES, *UNCOMPOSED, *_OF_UNCOMPOSED}
    known = catalogue()
    fixed = {name: flat[name] for name in flat if name in known and name not in chosen}
    job["space"]["fixed"] = fixed
    return job


def _more_layers(request: EstimateRequest) -> list[int]:
    """Numbers of offloaded layers as fine as a user with this many would look at them."""
    layers = request.model.num_layers
    return [count for count in (20, 40, 60, 80, 92, 120) if count < layers]


def _compared(request: EstimateRequest, measured_s: float) -> dict[str, Any]:
    prepared = _prepared(request)
    place = workplace_of(prepared)
    published = _figures(request, prepared)
    found: dict[str, Any] = {
        "measured_s": measured_s,
        "fits": published.fits,
        "gib": published.memory_bytes / 2**30,
        "limit_gib": published.limit_bytes / 2**30,
        "published_s": published.step_time_s,
    }
    plan = plan_space(prepared.space, prepared.checker, place, prepared.requirements)
    found["feasible"] = plan.counts.feasible
    if not plan.best:
        return found | {"note": "no candidate of the space fits"}
    best = plan.best[0]
    above = published.step_time_s / best.step_time_s - 1.0
    share = _faster_share(prepared, SpaceEstimator(place), published.step_time_s)
    found |= {
        "best_s": best.step_time_s,
        "above_best": above,
        "faster_share": share,
        "reached": above <= NEAR_BEST or share <= BEST_SHARE,
    }
    if above > FASTER:
        found["why_faster"] = _difference(request.candidate, published, best)
    return found


def _figures(request: EstimateRequest, prepared: PreparedJob) -> Figures:
    """The published configuration as the plan sees it: composed from profiles, or by a dry run
    where it uses what no profile has. Raises InputError.
    """
    flat = request.candidate.to_flat()
    if not any(flat.get(name) for name in UNCOMPOSED):
        estimator = SpaceEstimator(workplace_of(prepared))
        (found,) = Scales(estimator, prepared.checker).figures([request.candidate])
        if isinstance(found, str):
            raise InputError(found)
        return found
    document = {
        "model": request.model.to_flat(),
        "config": flat,
        "gpu": request.gpu.name,
        **{name: getattr(request, name) for name in _SHAPE},
    }
    answer = estimate_document(document, where="rediscovery")
    if answer["step_time_s"] is None:
        raise InputError(str(answer["time_breakdown"]["not_timed"]))
    peak, limit = answer["peak_allocated_bytes"], request.gpu.usable_memory_bytes
    return Figures(
        peak, limit if answer["fits"] else 0, answer["step_time_s"], {}, answer["time_breakdown"]
    )


_SHAPE = ("world_size", "seq_length", "global_batch_size", "gpus_per_node")


def _faster_share(prepared: PreparedJob, estimator: SpaceEstimator, seconds: float) -> float:
    """The share of a random draw of candidates that fit which are predicted to be faster."""
    space = factor_space(prepared.space, prepared.checker, OFFLOAD_FIELDS)
    tails = [np.flatnonzero(space.tail_group == g) for g in range(int(space.tail_group.max()) + 1)]
    each = np.array([len(rows) for rows in tails], dtype=float)[space.head_group]
    rng = np.random.default_rng(0)
    heads = rng.choice(len(each), size=DRAWN, p=each / each.sum())
    drawn = [
        space.candidate(int(head), int(rng.choice(tails[space.head_group[head]]))) for head in heads
    ]
    block = listed(drawn)
    estimator.measure(estimator.needed(block))
    estimates = estimator.estimate(block)
    fitting = estimates.fits & np.isfinite(estimates.step_time_s)
    if not fitting.any():
        return 0.0
    return float((estimates.step_time_s[fitting] < seconds).mean())


def _difference(published: Candidate, figures: Figures, best: Ranked) -> dict[str, Any]:
    """What the best candidate does otherwise, and where it is predicted to spend less."""
    ours, theirs = best.candidate.to_flat(), published.to_flat()
    differing = {
        name: [theirs.get(name), ours.get(name)]
        for name in sorted({*ours, *theirs})
        if (ours.get(name) or None) != (theirs.get(name) or None)
    }
    seconds = {
        name: round(figures.time_parts.get(name, 0.0) - ours_s, 4)
        for name, ours_s in best.time_parts.items()
        if abs(figures.time_parts.get(name, 0.0) - ours_s) > 0.005 * best.step_time_s
    }
    return {"published_and_best": differing, "seconds_saved": seconds}


def summary(found: Sequence[Rediscovered]) -> dict[str, Any]:
    """How many were found, and every exception."""
    compared = [one for one in found if one.reached is not None]
    return {
        "runs": len(found),
        "compared": len(compared),
        "reached": sum(bool(one.reached) for one in compared),
        "reached_share": (
            sum(bool(one.reached) for one in compared) / len(compared) if compared else None
        ),
        "reached_of_those_in_their_space": [
            sum(bool(one.reached) for one in compared if one.in_space),
            sum(bool(one.in_space) for one in compared),
        ],
        "valid": sum(one.valid is True for one in found),
        "fitting": sum(one.fits is True for one in found),
        "not_valid": {one.id: list(one.violations) for one in found if one.valid is False},
        "not_fitting": {
            one.id: f"{one.run}: {one.gib:.1f} of {one.limit_gib:.1f} GiB"
            for one in found
            if one.fits is False
        },
        "not_compared": {one.id: one.note for one in found if one.reached is None},
        "rows": [asdict(one) for one in found],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--kept", type=Path, help="keep answers in this file, and go on from it")
    parser.add_argument("--model", action="append", help="only models whose name holds this")
    parser.add_argument("--at-most", type=int, help="stop after so many new runs")
    options = parser.parse_args()
    kept: dict[str, Any] = {}
    if options.kept and options.kept.exists():
        kept = json.loads(options.kept.read_text())
    found, new = [], 0
    for row in published_runs(read_rows(options.data)):
        if options.model and not any(part in row["model"] for part in options.model):
            continue
        if row["id"] not in kept:
            if options.at_most is not None and new >= options.at_most:
                continue
            new += 1
            kept[row["id"]] = asdict(rediscover(row))
            print(json.dumps(kept[row["id"]]), file=sys.stderr, flush=True)
            if options.kept:
                options.kept.write_text(json.dumps(kept, indent=1))
        found.append(Rediscovered(**kept[row["id"]] | {"in_space": in_space(row)}))
    document = {"command": shlex.join(["python", *sys.argv]), **summary(found)}
    print(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
