"""`tuner tune`: from a job file to best.yaml."""

from __future__ import annotations

import contextlib
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tuner.commands.output import console, print_json
from tuner.errors import InputError

if TYPE_CHECKING:
    from tuner.cluster.prepared import PreparedJob
    from tuner.cluster.tuning import TuningRun
    from tuner.study_dir import StudyDirectory


def run_tune(
    job_path: Path | None,
    study: Path | None,
    resume: Path | None,
    address: str | None,
    trials: int | None,
    *,
    as_json: bool,
) -> int:
    """Run or resume a study; 0 with an answer, 1 without one, 130 where it was interrupted."""
    prepared, directory = open_run(job_path, study, resume, trials)
    err = console(stderr=True)
    err.print(f"study {directory.path}: {prepared.job.name}, model {prepared.model.name}")
    # Ray prints what befalls its processes on standard output, which is for the answer.
    with contextlib.redirect_stdout(sys.stderr):
        ended = run_study(prepared, directory, address, resume=resume is not None)
    if as_json:
        print_json(ended.summary)
    else:
        _print_result(ended.summary, prepared, directory)
    if ended.interrupted:
        path = shlex.quote(str(directory.path))
        err.print(f"stopped; go on with: tuner tune --resume {path}")
        return 130
    return 0 if ended.summary["best"] is not None else 1


def open_run(
    job_path: Path | None, study: Path | None, resume: Path | None, trials: int | None
) -> tuple[PreparedJob, StudyDirectory]:
    """The prepared job and its study directory, new or reopened.

    Everything wrong with the job is found before the directory is made. Raises InputError.
    """
    from tuner.cluster.prepared import prepare
    from tuner.job import find_job, load_job
    from tuner.study_dir import create_study_directory, free_path, open_study_directory

    if (job_path is None) == (resume is None):
        raise InputError("give a JOB file, or --resume STUDY", fix="see tuner tune --help")
    reopened = None if resume is None else open_study_directory(resume)
    file = find_job(job_path) if job_path is not None else reopened.job_path  # type: ignore[union-attr]
    base_folder = file.resolve().parent if reopened is None else reopened.job_folder
    job = load_job(file)
    if trials is not None:
        budget = job.budget.model_copy(update={"trials": trials})
        job = job.model_copy(update={"budget": budget})
    prepared = prepare(job, where=str(file), base_folder=base_folder)
    if reopened is not None:
        return prepared, reopened
    folder = study or free_path(Path("studies"), job.name)
    return prepared, create_study_directory(folder, file)


def run_study(
    prepared: PreparedJob, directory: StudyDirectory, address: str | None, *, resume: bool
) -> TuningRun:
    """Run the study with progress on stderr."""
    from tuner.cluster.tuning import run_tuning
    from tuner.progress import ProgressDisplay

    job = prepared.job
    with (
        directory.locked(),
        ProgressDisplay(
            console(stderr=True),
            trials=job.budget.trials,
            wall_clock_s=job.budget.wall_clock_s,
            metric=job.objective.measured_figure,
            world_size_of=prepared.world_size_of,
        ) as display,
    ):
        return run_tuning(
            prepared, directory, display, address=address, resume=resume, review=_review
        )


def _review(directory: StudyDirectory, interrupted: bool) -> tuple[str, Sequence[Path]]:
    """Report and exports of the study; a Ctrl-C does not wait for predictions."""
    from tuner.report import hand_over

    try:
        handed = hand_over(directory, predictions=not interrupted)
    except (InputError, OSError) as error:
        console(stderr=True).print(f"no report: {error}; later: tuner report {directory.path}")
        return "", ()
    return handed.note, handed.paths


def _print_result(
    summary: dict[str, Any], prepared: PreparedJob, directory: StudyDirectory
) -> None:
    from tuner.progress import pareto_lines, result_table
    from tuner.tracking.mlflow_records import shown_uri

    out = console()
    counts = summary["counts"]
    shown = ", ".join(f"{count} {name}" for name, count in counts.items() if name != "trials")
    out.print(f"\n{counts['trials']} trials ({shown}); ended: {summary['ended_because']}")
    if summary["best"] is None:
        out.print("no trial completed within the memory limit; see the reasons in summary.json")
        return
    out.print(result_table(summary, prepared.world_size_of))
    out.print("\nPareto front of throughput against memory:")
    for line in pareto_lines(summary, prepared.world_size_of):
        out.print(line)
    out.print(f"\nbest candidate: {directory.best_path}")
    out.print(f"run it again:   tuner run {directory.best_path}")
    uri = prepared.job.tracking.uri
    if uri is not None and uri.startswith("http"):
        out.print(f"dashboard:      {shown_uri(uri)}")
    else:
        store = uri or f"sqlite:///{directory.path}/mlflow.db"
        out.print(f"dashboard:      mlflow ui --backend-store-uri {shown_uri(store)}")
