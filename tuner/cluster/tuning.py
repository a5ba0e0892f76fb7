"""Runs a prepared job under Ray Tune: the life of `tuner tune` from first trial to best.yaml."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from tuner.cluster.attempts import finished_result
from tuner.cluster.fleet import Fleet, RayNode, ray_nodes
from tuner.cluster.prepared import PreparedJob
from tuner.cluster.proposals import Proposals, proposals_of
from tuner.cluster.session import devices_per_node, ray_session, signals_stop_tune
from tuner.errors import EnvironmentLacksError
from tuner.measurement import Outcome, write_json_atomically
from tuner.search.records import Proposal, TrialRecord, best_of
from tuner.search.study import TuningStudy, open_study
from tuner.study_dir import StudyDirectory
from tuner.summary import best_document, summarize

if TYPE_CHECKING:
    from tuner.cluster.searcher import StudySearcher
    from tuner.job import Cluster
    from tuner.tracking.mlflow_records import StudyRecords

_LOOKAHEAD = 12
"""Trials in line where candidates differ in size, for small ones to fill the gaps; one for each
node of a larger cluster."""

FindNodes = Callable[[], Sequence[RayNode]]

Review = Callable[[StudyDirectory, bool], tuple[str, Sequence[Path]]]
"""Writes what people take away from a study that ended, or (True) was interrupted: gives a note in
Markdown and the files and folders it made."""


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
    find_nodes: FindNodes | None = None,
    review: Review | None = None,
) -> TuningRun:
    """Run trials until the budget is spent, the space is exhausted or a signal comes.

    `address` is that of a running Ray cluster; None starts Ray on this machine. `find_nodes` says
    which nodes of it to use, all large enough ones by default. `review` is called at the end. With
    `resume` the interrupted trials of the study are run again and its finished ones count against
    the budget. Raises EnvironmentLacksError where MLflow or the cluster cannot be used; trials that
    fail are outcomes, not exceptions.
    """
    from tuner.tracking.mlflow_records import default_uri, open_records

    job = prepared.job
    proposals = proposals_of(prepared, directory.path)
    study = open_study(
        directory.storage_url,
        "tuner",
        prepared.space,
        prepared.check,
        metric=job.objective.measured_figure,
        memory_limit_bytes=job.cluster.memory_limit_bytes,
        sampler=job.search.sampler,
        seed=job.search.seed,
        engine=proposals.engine,
    )
    if resume:
        _settle(study, directory, prepared)
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
    ended_because, quarantined = "interrupted", dict[str, str]()
    with contextlib.closing(records):
        records.reopen()
        records.reconcile(study.records(), prepared.world_size_of)
        with (
            signals_stop_tune() as stopped,
            contextlib.suppress(KeyboardInterrupt),  # a stop while Ray and the agents start
            ray_session(prepared, address),
            _fleet(prepared, directory, address, find_nodes) as fleet,
        ):
            quarantined = fleet.quarantined
            proposals.learn(study.records())
            searcher = _searcher(prepared, directory, study, records, display, fleet, proposals)
            _fit(searcher, directory)
            ended_because = "interrupted" if stopped else searcher.ended_because
        reason = f"stopped by {stopped[0]}" if stopped else "the study ended before it ran"
        study.interrupt_running(reason, requeue=False)
        return _conclude(
            prepared,
            directory,
            study,
            records,
            ended_because,
            quarantined,
            review,
            learned=proposals.calibration,
        )


def _settle(study: TuningStudy, directory: StudyDirectory, prepared: PreparedJob) -> None:
    """End the trials that a dead driver left running: with their result, or to be run again."""
    from tuner.cluster.searcher import within_limit

    for record in study.records():
        result = finished_result(directory.trial_path(record.number)) if record.running else None
        if result is not None:
            study.tell(record.number, within_limit(result, prepared.job.cluster.memory_limit_bytes))
    study.interrupt_running("the tuner ended before the trial did", requeue=False)
    study.requeue_interrupted()


@contextlib.contextmanager
def _fleet(
    prepared: PreparedJob,
    directory: StudyDirectory,
    address: str | None,
    find_nodes: FindNodes | None,
) -> Iterator[Fleet]:
    """The study's nodes, checked; their agents end with the context."""
    cluster = prepared.job.cluster
    devices = devices_per_node(prepared, address)
    find_nodes = find_nodes or (lambda: ray_nodes(cluster.device, devices))
    _require_nodes(len(find_nodes()), cluster)
    checks = cluster.health_check
    fleet = Fleet(
        directory.study_id,
        trainable=prepared.job.trainable.name,
        device=cluster.device,
        nodes=cluster.nodes,
        devices=devices,
        health_check=cluster.device == "cuda" or cluster.nodes > 1 if checks is None else checks,
        folder=(directory.path / "health").resolve(),
        find_nodes=find_nodes,
    )
    try:
        fleet.refresh()
        if not fleet.ledger.nodes:
            reasons = "; ".join(f"{name}: {why}" for name, why in fleet.quarantined.items())
            raise EnvironmentLacksError(f"no node of the cluster can be used ({reasons})")
        yield fleet
    finally:
        fleet.close()


def _require_nodes(found: int, cluster: Cluster) -> None:
    """Refuse a job the cluster can never run: its trials would wait for ever."""
    if found < cluster.nodes:
        resource = "CPU" if cluster.device == "cpu" else "GPU"
        raise EnvironmentLacksError(
            f"the job wants {cluster.nodes} node(s) with {cluster.gpus_per_node} {resource}s, "
            f"the Ray cluster has {found} such node(s)"
        )


def _searcher(
    prepared: PreparedJob,
    directory: StudyDirectory,
    study: TuningStudy,
    records: StudyRecords,
    display: Display,
    fleet: Fleet,
    proposals: Proposals,
) -> StudySearcher:
    from tuner.cluster.dispatcher import Dispatcher
    from tuner.cluster.searcher import Limits, StudySearcher, TrialPlan

    def on_start(proposal: Proposal) -> None:
        records.start_trial(
            proposal.number, proposal.candidate, prepared.world_size_of(proposal.candidate)
        )
        display.started(proposal)

    def on_end(record: TrialRecord) -> None:
        records.end_trial(record, prepared.world_size_of(record.candidate))
        display.ended(record)
        proposals.learn([record])

    job = prepared.job
    done = [r for r in study.records() if r.outcome != Outcome.INTERRUPTED.value]
    return StudySearcher(
        study,
        TrialPlan(
            prepared.spec_of,
            prepared.placement_of,
            lambda number: str(directory.trial_path(number).resolve()),
            prepared.placement_of_all,
            job.trainable.hang_after_s,
        ),
        job.budget,
        Dispatcher(fleet),
        Limits(
            trials=job.budget.trials - len(done),
            concurrent=job.trainable.max_concurrent or (1 if job.cluster.device == "cpu" else None),
            lookahead=max(_LOOKAHEAD, job.cluster.nodes),
            race=job.search.race,
        ),
        seats_json=fleet.seats_json,
        on_start=on_start,
        on_end=on_end,
    )


def _fit(searcher: StudySearcher, directory: StudyDirectory) -> None:
    from ray import tune

    from tuner.cluster.kept_actors import KeepActors
    from tuner.cluster.searcher import StudySearch
    from tuner.cluster.trial_actor import TrialActor

    # A trial's devices are held by the agents of its nodes; its actor only waits for them.
    resources = tune.PlacementGroupFactory([{"node:__internal_head__": 0.0001}])
    tuner = tune.Tuner(
        tune.with_resources(TrialActor, resources),
        tune_config=tune.TuneConfig(
            search_alg=StudySearch(searcher),
            scheduler=KeepActors(),
            num_samples=-1,
            reuse_actors=True,
        ),
        run_config=tune.RunConfig(
            name="trials", storage_path=str((directory.path / "ray").resolve()), verbose=0
        ),
    )
    tuner.fit()


def _conclude(
    prepared: PreparedJob,
    directory: StudyDirectory,
    study: TuningStudy,
    records: StudyRecords,
    ended_because: str,
    quarantined: Mapping[str, str],
    review: Review | None = None,
    *,
    learned: Path | None = None,
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
    summary["quarantined"] = dict(quarantined)
    write_json_atomically(directory.summary_path, summary)
    artifacts = [directory.summary_path, directory.job_path]
    if learned is not None:
        artifacts.append(learned)
    best = best_of(trials, metric)
    metrics: dict[str, float] = {"trials": float(len(trials))}
    if best is not None:
        write_best(directory, prepared, best)
        artifacts.append(directory.best_path)
        metrics[f"best_{metric}"] = float(getattr(best.measurement, metric))
    note, more = ("", ()) if review is None else review(directory, interrupted)
    records.reconcile(trials, prepared.world_size_of)
    records.finish(
        "KILLED" if interrupted else "FINISHED",
        metrics,
        [*artifacts, *more],
        note=note,
        model="" if best is None or review is None else prepared.job.name,
    )
    return TuningRun(summary, interrupted)


def write_best(directory: StudyDirectory, prepared: PreparedJob, best: TrialRecord) -> None:
    """Write best.yaml whole or not at all."""
    import yaml

    document = best_document(
        best,
        model=prepared.job.model,
        spec=asdict(prepared.spec_of(best.ran)),
        metric=prepared.job.objective.measured_figure,
        trial_dir=directory.trial_path(best.number),
        trainable=prepared.job.trainable.name,
    )
    temporary = Path(f"{directory.best_path}.part")
    temporary.write_text(yaml.safe_dump(document, sort_keys=False))
    temporary.replace(directory.best_path)
