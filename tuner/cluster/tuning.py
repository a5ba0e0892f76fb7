"""Runs a prepared job under Ray Tune: the life of `tuner tune` from first trial to best.yaml."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from tuner.cluster.prepared import PreparedJob
from tuner.cluster.proposals import engine_of
from tuner.errors import EnvironmentLacksError
from tuner.measurement import Outcome, write_json_atomically
from tuner.search.records import Proposal, TrialRecord, best_of
from tuner.search.study import TuningStudy, open_study
from tuner.study_dir import StudyDirectory
from tuner.summary import best_document, summarize

if TYPE_CHECKING:
    from tuner.cluster.searcher import StudySearcher
    from tuner.tracking.mlflow_records import StudyRecords


class Display(Protocol):
    """Shows progress; `tuner.progress` has the terminal's."""

    def started(self, proposal: Proposal) -> None: ...

    def ended(self, record: TrialRecord) -> None: ...


@dataclass(frozen=True, slots=True)
class TuningRun:
    """How a run of the study ended: its summary document, and whether it was cut short."""

    summary: dict[str, Any]
    interrupted: bool


def run_tuning(
    prepared: PreparedJob,
    directory: StudyDirectory,
    display: Display,
    *,
    address: str | None = None,
    resume: bool = False,
) -> TuningRun:
    """Run trials until the budget is spent, the space is exhausted or a signal comes.

    `address` is that of a running Ray cluster; None starts Ray on this machine. With `resume` the
    interrupted trials of the study are run again and its finished ones count against the budget.
    Raises EnvironmentLacksError where MLflow or the cluster cannot be used; trials that fail are
    outcomes, not exceptions.
    """
    from tuner.tracking.mlflow_records import default_uri, open_records

    job = prepared.job
    study = open_study(
        directory.storage_url,
        "tuner",
        prepared.space,
        prepared.check,
        metric=job.objective.measured_figure,
        memory_limit_bytes=_limit_bytes(prepared),
        sampler=job.search.sampler,
        seed=job.search.seed,
        engine=engine_of(prepared),
    )
    if resume:
        study.interrupt_running("the tuner ended before the trial did", requeue=False)
        study.requeue_interrupted()
    else:
        for flat in job.search.start:
            study.enqueue(flat)
    records = open_records(
        job.tracking.uri or default_uri(directory.path),
        job.tracking.experiment,
        study_id=directory.study_id,
        name=job.name,
        study_dir=directory.path,
    )
    records.reopen()
    with _ray(prepared, address), _signals_stop_tune() as stopped:
        searcher = _searcher(prepared, directory, study, records, display)
        _fit(searcher, prepared, directory)
    interrupted = bool(stopped)
    if interrupted:
        study.interrupt_running(f"stopped by {stopped[0]}", requeue=False)
    ended_because = "interrupted" if interrupted else searcher.ended_because
    return _conclude(prepared, directory, study, records, ended_because)


def _limit_bytes(prepared: PreparedJob) -> int | None:
    limit = prepared.job.cluster.memory_limit_gib
    return None if limit is None else int(limit * 2**30)


def _searcher(
    prepared: PreparedJob,
    directory: StudyDirectory,
    study: TuningStudy,
    records: StudyRecords,
    display: Display,
) -> StudySearcher:
    from tuner.cluster.searcher import StudySearcher, TrialPlan

    def on_start(proposal: Proposal) -> None:
        records.start_trial(
            proposal.number, proposal.candidate, prepared.world_size_of(proposal.candidate)
        )
        display.started(proposal)

    def on_end(record: TrialRecord) -> None:
        records.end_trial(record, prepared.world_size_of(record.candidate))
        display.ended(record)

    budget = prepared.job.budget
    done = [r for r in study.records() if r.outcome != Outcome.INTERRUPTED.value]
    return StudySearcher(
        study,
        TrialPlan(
            prepared.spec_of,
            prepared.placement_of,
            lambda number: str(directory.trial_path(number).resolve()),
            prepared.job.trainable.name,
        ),
        budget,
        trials=budget.trials - len(done),
        race=prepared.job.search.race,
        on_start=on_start,
        on_end=on_end,
    )


def _fit(searcher: StudySearcher, prepared: PreparedJob, directory: StudyDirectory) -> None:
    from ray import tune

    from tuner.cluster.searcher import StudySearch
    from tuner.cluster.trial_actor import TrialActor

    job = prepared.job
    concurrent = job.trainable.max_concurrent or (1 if job.cluster.device == "cpu" else None)

    def resources(config: dict[str, Any]) -> tune.PlacementGroupFactory:
        return tune.PlacementGroupFactory(config["bundles"], strategy=config["strategy"])

    tuner = tune.Tuner(
        tune.with_resources(TrialActor, resources),
        tune_config=tune.TuneConfig(
            search_alg=StudySearch(searcher, concurrent),
            num_samples=job.budget.trials,
            reuse_actors=True,
        ),
        run_config=tune.RunConfig(
            name="trials", storage_path=str((directory.path / "ray").resolve()), verbose=0
        ),
    )
    tuner.fit()


@contextlib.contextmanager
def _ray(prepared: PreparedJob, address: str | None) -> Iterator[None]:
    """A Ray session for the study; a local one ends with it, processes included."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("TUNE_DISABLE_AUTO_CALLBACK_LOGGERS", "1")
    # Ray lowers its workers' priority by 15, which would slow the measured ranks.
    os.environ.setdefault("RAY_worker_niceness", "0")
    os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ["TUNE_DISABLE_SIGINT_HANDLER"] = "1"
    import ray

    for name in ("ray", "ray.tune", "ray.train"):
        logging.getLogger(name).setLevel(logging.ERROR)
    cluster = prepared.job.cluster
    options: dict[str, Any] = {
        "address": address or "local",
        "logging_level": logging.ERROR,
        "log_to_driver": False,
    }
    if address is None:
        concurrent = prepared.job.trainable.max_concurrent or 1
        ranks = cluster.gpus_per_node * (concurrent if cluster.device == "cpu" else 1)
        options |= {"include_dashboard": False, "num_cpus": max(os.cpu_count() or 1, ranks)}
    try:
        ray.init(**options)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise EnvironmentLacksError(
            f"the Ray cluster at {address or 'this machine'} cannot be used: {error}"
        ) from None
    try:
        _require_resources(prepared)
        yield
    finally:
        ray.shutdown()


def _require_resources(prepared: PreparedJob) -> None:
    """Refuse a job the cluster can never run: Ray would wait for the resources for ever."""
    import ray

    cluster = prepared.job.cluster
    resource = "CPU" if cluster.device == "cpu" else "GPU"
    there = [
        node["Resources"].get(resource, 0.0) for node in ray.nodes() if node.get("Alive", False)
    ]
    enough = sum(1 for amount in there if amount >= cluster.gpus_per_node)
    if enough < cluster.nodes:
        raise EnvironmentLacksError(
            f"the job wants {cluster.nodes} node(s) with {cluster.gpus_per_node} {resource}s, "
            f"the Ray cluster has {enough} such node(s) (it has {sum(there):g} {resource}s in all)"
        )


@contextlib.contextmanager
def _signals_stop_tune() -> Iterator[list[str]]:
    """SIGINT and SIGTERM end the Tune loop in order; the list then names the signal.

    Ray Tune always stops on SIGUSR1; its own SIGINT handler is off, since a second Ctrl-C would
    then end the process before the study is closed.
    """
    stopped: list[str] = []

    def stop(number: int, frame: object) -> None:
        stopped.append(signal.Signals(number).name)
        if len(stopped) == 1:
            os.kill(os.getpid(), signal.SIGUSR1)

    # Until Tune installs its handler, SIGUSR1 would end the process.
    kept = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    kept[signal.SIGUSR1] = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        yield stopped
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)


def _conclude(
    prepared: PreparedJob,
    directory: StudyDirectory,
    study: TuningStudy,
    records: StudyRecords,
    ended_because: str,
) -> TuningRun:
    """Write the summary and the best candidate, then bring MLflow up to the study."""
    trials = study.records()
    metric = prepared.job.objective.measured_figure
    interrupted = ended_because == "interrupted"
    summary = summarize(
        trials,
        name=prepared.job.name,
        metric=metric,
        rejected=study.rejected(),
        ended_because=ended_because,
    )
    summary["study_dir"] = str(directory.path)
    write_json_atomically(directory.summary_path, summary)
    artifacts = [directory.summary_path, directory.job_path]
    best = best_of(trials, metric)
    metrics: dict[str, float] = {"trials": float(len(trials))}
    if best is not None:
        write_best(directory, prepared, best)
        artifacts.append(directory.best_path)
        metrics[f"best_{metric}"] = float(getattr(best.measurement, metric))
    records.reconcile(trials, prepared.world_size_of)
    records.finish("KILLED" if interrupted else "FINISHED", metrics, artifacts)
    return TuningRun(summary, interrupted)


def write_best(directory: StudyDirectory, prepared: PreparedJob, best: TrialRecord) -> None:
    """Write best.yaml whole or not at all."""
    import yaml

    document = best_document(
        best,
        model=prepared.job.model,
        spec=asdict(prepared.spec_of(best.candidate)),
        metric=prepared.job.objective.measured_figure,
        trial_dir=directory.trial_path(best.number),
        trainable=prepared.job.trainable.name,
    )
    temporary = Path(f"{directory.best_path}.part")
    temporary.write_text(yaml.safe_dump(document, sort_keys=False))
    temporary.replace(directory.best_path)
