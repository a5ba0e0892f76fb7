"""`tuner plan`: the best candidates of a job's space, without a GPU."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tuner.commands.output import coloured, console, print_json, working
from tuner.configuration import mcore_version
from tuner.errors import InputError

if TYPE_CHECKING:
    from tuner.candidate import Candidate
    from tuner.cluster.prepared import PreparedJob
    from tuner.job import Job
    from tuner.search.planning.front import Ranked
    from tuner.search.planning.workplace import Workplace
    from tuner.search.validity import ValidityChecker

_GIB = 2**30


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """How a job is planned: candidates shown, finalists dry-run in full, processes."""

    top: int = 10
    confirm: int = 2
    workers: int | None = None


def run_plan(
    job_path: Path,
    request: PlanRequest,
    *,
    gpus: str | None,
    gpu: str | None,
    seq_length: int | None = None,
    global_batch_size: int | None = None,
    started_with: Sequence[str] = (),
    plot: Path | None,
    html: Path | None,
    out: Path | None = None,
    as_json: bool,
) -> int:
    """Plan and print; 0 where something fits, 1 where nothing does."""
    from tuner.cluster.prepared import prepare
    from tuner.commands.starting import Run, starting_job

    sizes, names = _sizes(gpus) if gpus else [], gpu.split(",") if gpu else []
    first = (names[0].strip() if names else None, sizes[0] if sizes else None)
    start = starting_job(job_path, Run(*first, seq_length, global_batch_size, started_with))
    file, job = start.file, start.job
    if (gpus is None and gpu is None) or (start.made and max(len(sizes), len(names)) <= 1):
        prepared = prepare(
            job, where=str(file), base_folder=file.resolve().parent, frontend=start.frontend
        )
        answer = planned(prepared, request, where=str(file), start=start.candidate)
        answer["assumed"] = dict(start.assumed)
        if html is not None:
            _write_html(answer, prepared, file, html)
        if out is not None and answer["candidates"]:
            _write_best(answer, prepared, str(file), out)
        if as_json:
            print_json(answer)
        else:
            _print_plan(answer, job.name)
        return 0 if answer["candidates"] else 1
    for option, path in (("--html", html), ("--out", out)):
        if path is not None:
            raise InputError("is of one cluster", field=option, fix="leave out --gpus and --gpu")
    clusters = _clusters(job, gpus, gpu)
    answer = {
        "clusters": [
            _on_cluster(changed, request, str(file), file.resolve().parent, start.frontend)
            for changed in clusters
        ]
    }
    _compare(answer["clusters"])
    if plot is not None:
        _plot(answer["clusters"], plot)
    if as_json:
        print_json(answer)
    else:
        _print_clusters(answer["clusters"], job.name)
    return 0 if any(one["best"] for one in answer["clusters"]) else 1


def plan_document(
    job: Job, request: PlanRequest, *, where: str, base_folder: Path, frontend: str | None = None
) -> dict[str, Any]:
    """The document of `tuner plan` for a job, under the rules of a front end where it is not the
    trainable's own. Raises InputError naming what is wrong with it."""
    from tuner.cluster.prepared import prepare

    prepared = prepare(job, where=where, base_folder=base_folder, frontend=frontend)
    return planned(prepared, request, where=where)


def planned(
    prepared: PreparedJob, request: PlanRequest, *, where: str, start: Candidate | None = None
) -> dict[str, Any]:
    """`plan_document` of a prepared job, with what `start` gives beside its best candidates."""
    from tuner.search.explain import explain_best
    from tuner.search.planning.confirm import confirm_plan
    from tuner.search.planning.machine import workplace_of
    from tuner.search.planning.plan import plan_space, require_gpu_space

    job = prepared.job
    require_gpu_space(prepared.space)
    if job.cluster.device == "cpu":
        raise InputError(
            "a plan is for GPUs", where=where, field="cluster.device", fix="use tuner tune"
        )
    place = workplace_of(prepared, where=where)
    with _ProgressBar() as bar:
        plan = plan_space(
            prepared.space,
            prepared.checker,
            place,
            prepared.requirements,
            workers=request.workers,
            progress=bar.show,
        )
        confirmed = confirm_plan(plan, place, request.confirm, _dry_run, bar.show)
    plan, answers = confirmed.plan, confirmed.answers
    counts = plan.counts
    return {
        "job": job.name,
        "gpu": place.gpu.name,
        "world_size": place.world_size,
        "candidates": [
            _document(one, place, answers.get(one.candidate.key))
            for one in plan.best[: request.top]
        ],
        "pareto": [_document(one, place, answers.get(one.candidate.key)) for one in plan.pareto],
        "counts": {
            "enumerated": counts.enumerated,
            "invalid": counts.enumerated - counts.valid,
            "not_required": counts.not_required,
            "not_estimated": counts.not_estimated,
            "oom": counts.oom,
            "feasible": counts.feasible,
        },
        "not_estimated_because": dict(counts.problems.most_common()),
        "refuted_by_dry_run": confirmed.left_out,
        "confirmed_by_dry_run": sum(answer["fits"] is True for answer in answers.values()),
        "profiled_settings": plan.profiled,
        "fixed": dict(prepared.space.fixed),
        "explanation": explain_best(plan, place, prepared.space.fixed),
        "seconds": plan.seconds,
        **({} if start is None else {"start": _start(start, place, prepared.checker)}),
    }


def _start(candidate: Candidate, place: Workplace, checker: ValidityChecker) -> dict[str, Any]:
    """What the configuration that a plan starts from needs, and what is wrong with it."""
    from tuner.constraints.result import TYPE_RULES
    from tuner.search.planning.estimator import SpaceEstimator
    from tuner.search.planning.weighing import Scales

    broken = checker.errors(candidate)
    known = {
        "config": candidate.to_flat(mcore=mcore_version()),
        "valid": not broken,
        "violations": [violation.to_json() for violation in broken],
    }
    impossible = [violation.message for violation in broken if violation.rule in TYPE_RULES]
    if impossible:
        return {**known, "fits": None, "reason": "; ".join(impossible)}
    (found,) = Scales(SpaceEstimator(place), checker).figures([candidate])
    if isinstance(found, str):
        return {**known, "fits": None, "reason": found}
    return {
        **known,
        "fits": found.fits,
        "step_time_s": found.step_time_s,
        "peak_allocated_bytes": int(found.memory_bytes),
        "limit_bytes": int(found.limit_bytes),
    }


def _dry_run(document: Mapping[str, Any], ranks: Sequence[int] | None) -> Mapping[str, Any]:
    from tuner.commands.estimate import estimate_document

    return estimate_document(document, where="plan", ranks=ranks)


def _document(one: Ranked, place: Workplace, confirmed: Mapping[str, Any] | None) -> dict[str, Any]:
    from tuner.models import model_flops_per_step

    tokens = place.seq_length * place.global_batch_size
    flops = model_flops_per_step(
        place.model,
        place.seq_length,
        place.global_batch_size,
        tensor_model_parallel_size=one.candidate.tensor_model_parallel_size,
    )
    per_gpu_s = one.step_time_s * place.world_size
    rate = flops / per_gpu_s
    peak = place.gpu.peak_flops.get("bf16")
    return {
        "config": one.candidate.to_flat(mcore=mcore_version()),
        "estimate": {
            "step_time_s": one.step_time_s,
            "tokens_per_s_per_gpu": tokens / per_gpu_s,
            "tflops_per_gpu": rate / 1e12,
            "mfu": None if peak is None else rate / peak,
            "peak_allocated_bytes": int(one.memory_bytes),
            "limit_bytes": int(one.limit_bytes),
            "breakdown": {name: int(part) for name, part in one.memory_parts.items()},
            "time_breakdown": one.time_parts,
            "profiled": one.exact,
        },
        "confirmed": None if confirmed is None else dict(confirmed),
    }


def _clusters(job: Job, gpus: str | None, gpu: str | None) -> list[Job]:
    """The job on every combination of GPU type and count."""
    from tuner.hardware import get_gpu

    names = [name.strip() for name in gpu.split(",")] if gpu else [job.cluster.gpu or ""]
    sizes = _sizes(gpus) if gpus else [job.cluster.world_size]
    changed = []
    for name, size in itertools.product(names, sizes):
        per_node = get_gpu(name).gpus_per_node if gpu else job.cluster.gpus_per_node
        per_node = min(per_node, size)
        if size % per_node:
            raise InputError(
                f"{size} GPUs are no whole number of nodes of {per_node}", field="--gpus"
            )
        cluster = job.cluster.model_copy(
            update={"gpu": name, "gpus_per_node": per_node, "nodes": size // per_node}
        )
        changed.append(job.model_copy(update={"cluster": cluster}))
    return changed


def _sizes(text: str) -> list[int]:
    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError:
        sizes = []
    if not sizes or min(sizes) < 1:
        raise InputError(f"{text!r} is no list of GPU counts", field="--gpus", fix="write 64,128")
    return sizes


def _on_cluster(
    job: Job, request: PlanRequest, where: str, base_folder: Path, frontend: str | None
) -> dict[str, Any]:
    cluster = job.cluster
    entry: dict[str, Any] = {"gpu": cluster.gpu, "gpus": cluster.world_size, "best": None}
    try:
        answer = plan_document(
            job, request, where=where, base_folder=base_folder, frontend=frontend
        )
    except InputError as error:
        return {**entry, "reason": str(error)}
    entry |= {name: answer[name] for name in ("counts", "seconds", "fixed")}
    if not answer["candidates"]:
        return {**entry, "reason": "no candidate fits"}
    best = answer["candidates"][0]
    rate = best["estimate"]["tokens_per_s_per_gpu"] * cluster.world_size
    entry |= {"best": best, "tokens_per_s": rate}
    if cluster.price_per_gpu_hour is not None:
        hourly = cluster.price_per_gpu_hour * cluster.world_size
        entry["cost_per_billion_tokens"] = hourly * 1e9 / (rate * 3600)
    return entry


def _write_html(answer: Mapping[str, Any], prepared: PreparedJob, file: Path, html: Path) -> None:
    from tuner.report import write_plan_report

    with working("report") as told:
        write_plan_report(answer, prepared, file, html, told)


def _write_best(answer: Mapping[str, Any], prepared: PreparedJob, where: str, path: Path) -> None:
    """Write the first candidate as `tuner estimate`, `explain` and `export` take it."""
    import yaml

    from tuner.candidate import Candidate
    from tuner.files import write_text
    from tuner.search.planning.confirm import document_of
    from tuner.search.planning.machine import workplace_of

    config = answer["candidates"][0]["config"]
    document = document_of(Candidate.from_flat(config), workplace_of(prepared, where=where))
    write_text(path, yaml.safe_dump({**document, "config": config}, sort_keys=False))


def _compare(clusters: Sequence[dict[str, Any]]) -> None:
    """Efficiency: tokens per second per GPU over that of the smallest cluster of the same GPU."""
    smallest: dict[str, dict[str, Any]] = {}
    for one in sorted((c for c in clusters if c["best"]), key=lambda c: c["gpus"]):
        smallest.setdefault(one["gpu"], one)
        first = smallest[one["gpu"]]
        one["efficiency"] = (one["tokens_per_s"] / one["gpus"]) / (
            first["tokens_per_s"] / first["gpus"]
        )


def _plot(clusters: Sequence[Mapping[str, Any]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for name in dict.fromkeys(one["gpu"] for one in clusters):
        known = [one for one in clusters if one["gpu"] == name and one["best"]]
        axes.plot(
            [one["gpus"] for one in known],
            [one["tokens_per_s"] for one in known],
            marker="o",
            label=str(name),
        )
    axes.set(xlabel="GPUs", ylabel="predicted tokens/s", xscale="log", yscale="log")
    axes.legend()
    figure.savefig(path)


class _ProgressBar:
    """A bar on stderr for each stage of planning; nothing where that is no terminal."""

    def __init__(self) -> None:
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
        )

        err = console(stderr=True)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=err,
            disable=not err.is_terminal,
        )
        self._tasks: dict[str, Any] = {}

    def __enter__(self) -> _ProgressBar:
        self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.stop()

    def show(self, stage: str, done: int, total: int) -> None:
        """Set the bar of a stage; a total of 0 is an unknown one."""
        if stage not in self._tasks:
            self._tasks[stage] = self._bar.add_task(stage)
        self._bar.update(self._tasks[stage], completed=done, total=total or None)


def _print_plan(answer: Mapping[str, Any], name: str) -> None:
    out = console()
    counts = answer["counts"]
    out.print(
        f"{name} on {answer['world_size']} {answer['gpu']}: {counts['enumerated']:,} combinations, "
        f"{counts['invalid']:,} invalid, {counts['oom']:,} too large, "
        f"{counts['feasible']:,} feasible; {answer['seconds']:.1f} s"
    )
    for reason, count in answer["not_estimated_because"].items():
        out.print(f"  {count:,} not estimated: {reason}")
    for field, value in answer["assumed"].items():
        out.print(f"assumed: {field} {value:,}, which the configuration does not say")
    if "start" in answer:
        out.print(_start_line(answer["start"], answer["candidates"]))
    if answer["refuted_by_dry_run"]:
        out.print(
            f"{answer['refuted_by_dry_run']:,} finalists left out: dry runs of some say that they "
            "do not fit, or Megatron-Core refuses them"
        )
    if not answer["candidates"]:
        out.print("no candidate fits")
        return
    if not answer["confirmed_by_dry_run"]:
        out.print(
            coloured(("no candidate below is confirmed by a dry run", "yellow"), " (--confirm)")
        )
    out.print(_table(answer["candidates"], answer, "best candidates"))
    front = _thinned(answer["pareto"])
    title = "Pareto front, leanest first"
    if len(front) < len(answer["pareto"]):
        title += f" ({len(front)} of {len(answer['pareto'])}; all with --format json)"
    out.print(_table(front, answer, title))
    for line in answer["explanation"]["text"]:
        out.print(line)


_FRONT_ROWS = 12


def _thinned(front: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """At most `_FRONT_ROWS` of a front, its ends among them, evenly taken."""
    if len(front) <= _FRONT_ROWS:
        return list(front)
    step = (len(front) - 1) / (_FRONT_ROWS - 1)
    return [front[round(place * step)] for place in range(_FRONT_ROWS)]


def _start_line(start: Mapping[str, Any], candidates: Sequence[Mapping[str, Any]]) -> str:
    """The given configuration beside the best one."""
    parts = [f"invalid ({one['rule']}): {one['message']}" for one in start["violations"]]
    if start["fits"] is None:
        return "yours: " + "; ".join([*parts, f"cannot be estimated: {start['reason']}"])
    parts.append("fits" if start["fits"] else "does not fit")
    parts.append(f"{start['peak_allocated_bytes'] / _GIB:.1f} GiB")
    parts.append(f"step {start['step_time_s']:.3f} s")
    if candidates:
        best = candidates[0]["estimate"]["step_time_s"]
        parts.append(f"the best below takes {1 - best / start['step_time_s']:.1%} less")
    return "yours: " + "; ".join(parts)


def _table(documents: Sequence[Mapping[str, Any]], answer: Mapping[str, Any], title: str) -> Any:
    from rich.table import Table

    from tuner.candidate import Candidate

    table = Table(title=title, box=None, pad_edge=False)
    for column in ("layout", "memory settings", "step s", "TFLOP/s/GPU", "peak GiB", "dry run"):
        table.add_column(column)
    for one in documents:
        candidate, estimate = Candidate.from_flat(one["config"]), one["estimate"]
        confirmed = one["confirmed"]
        shown = ""
        if confirmed is not None and confirmed["fits"] is not None:
            verdict = "fits" if confirmed["fits"] else "does not fit"
            shown = f"{confirmed['peak_allocated_bytes'] / _GIB:.1f} GiB, {verdict}"
        table.add_row(
            candidate.label(answer["world_size"]),
            candidate.memory_label(answer["fixed"]),
            f"{estimate['step_time_s']:.3f}",
            f"{estimate['tflops_per_gpu']:.0f}",
            f"{estimate['peak_allocated_bytes'] / _GIB:.1f}",
            shown,
        )
    return table


def _print_clusters(clusters: Sequence[Mapping[str, Any]], name: str) -> None:
    from rich.table import Table

    from tuner.candidate import Candidate

    table = Table(title=f"{name}: best candidate by cluster", box=None, pad_edge=False)
    for column in ("GPUs", "GPU", "layout", "memory settings", "tokens/s", "efficiency", "cost"):
        table.add_column(column)
    for one in clusters:
        if not one["best"]:
            table.add_row(str(one["gpus"]), str(one["gpu"]), one["reason"])
            continue
        candidate = Candidate.from_flat(one["best"]["config"])
        cost = one.get("cost_per_billion_tokens")
        table.add_row(
            str(one["gpus"]),
            str(one["gpu"]),
            candidate.label(one["gpus"]),
            candidate.memory_label(one["fixed"]),
            f"{one['tokens_per_s']:,.0f}",
            f"{one['efficiency']:.1%}",
            "" if cost is None else f"{cost:,.0f} per 10^9 tokens",
        )
    console().print(table)
