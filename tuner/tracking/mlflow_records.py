"""MLflow records of a study: one parent run, one child run per trial.

Params are the flat candidate, metrics the measured figures, tags the outcome and layout. Run names
and tags identify study and trial, so that a study can be reopened and its records completed:
`reconcile` writes whatever the study knows and MLflow does not. Calls that fail while trials run
are reported once and made up for by the next `reconcile`.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tuner.candidate import Candidate
from tuner.errors import EnvironmentLacksError
from tuner.measurement import Measurement, Outcome
from tuner.search.records import RUNNING, TrialRecord

if TYPE_CHECKING:
    from mlflow import MlflowClient

_LOG = logging.getLogger(__name__)
_GIB = 2**30
_RUN_STATUS = {
    Outcome.COMPLETED.value: "FINISHED",
    Outcome.INTERRUPTED.value: "KILLED",
}  # any other outcome is FAILED
_STUDY_TAG = "tuner.study_id"
_TRIAL_TAG = "tuner.trial"


def default_uri(study_dir: Path) -> str:
    """The SQLite store inside a study directory."""
    return f"sqlite:///{study_dir.resolve()}/mlflow.db"


def shown_uri(uri: str) -> str:
    """A tracking URI without the user name and password it may carry."""
    scheme, separator, rest = uri.partition("://")
    return f"{scheme}{separator}{rest.rpartition('@')[2]}"


class StudyRecords:
    """The MLflow side of one study. Open it with `open_records`."""

    def __init__(self, client: MlflowClient, experiment_id: str, study_id: str, run_id: str):
        self._client = client
        self._experiment_id = experiment_id
        self._study_id = study_id
        self.parent_run_id = run_id
        self._children: dict[int, str] = {}
        self._complained = False
        for run in self._find(f"tags.{_STUDY_TAG} = '{study_id}'"):
            if _TRIAL_TAG in run.data.tags:
                self._children[int(run.data.tags[_TRIAL_TAG])] = run.info.run_id

    def start_trial(self, number: int, candidate: Candidate, world_size: int) -> None:
        """Create the trial's child run with its params and layout tags; it is RUNNING."""
        self._try(lambda: self._create_child(number, candidate, world_size))

    def end_trial(self, record: TrialRecord, world_size: int) -> None:
        """Write a finished trial's outcome and figures and end its run."""
        self._try(lambda: self._write(record, world_size))

    def reconcile(
        self, records: Iterable[TrialRecord], world_size_of: Callable[[Candidate], int]
    ) -> None:
        """Bring MLflow to what the study says: missing runs are made, unended ones ended."""
        self._try(lambda: self._reconcile(records, world_size_of))

    def _reconcile(
        self, records: Iterable[TrialRecord], world_size_of: Callable[[Candidate], int]
    ) -> None:
        ended = {
            int(run.data.tags[_TRIAL_TAG])
            for run in self._find(f"tags.{_STUDY_TAG} = '{self._study_id}'")
            if _TRIAL_TAG in run.data.tags and run.info.status != "RUNNING"
        }
        for record in records:
            if record.number not in ended and record.outcome != RUNNING:
                self._write(record, world_size_of(record.candidate))

    def finish(self, status: str, metrics: Mapping[str, float], artifacts: Iterable[Path]) -> None:
        """End the parent run ("FINISHED" or "KILLED") with the best figures and its files."""
        self._try(lambda: self._finish(status, metrics, artifacts))

    def _finish(self, status: str, metrics: Mapping[str, float], artifacts: Iterable[Path]) -> None:
        self._log_metrics(self.parent_run_id, metrics)
        for path in artifacts:
            self._client.log_artifact(self.parent_run_id, str(path))
        self._client.set_terminated(self.parent_run_id, status)

    def reopen(self) -> None:
        """Mark the parent run RUNNING again, for a resumed study."""
        self._client.update_run(self.parent_run_id, status="RUNNING")

    def _create_child(self, number: int, candidate: Candidate, world_size: int) -> str:
        from mlflow.entities import Param

        tags = {
            "mlflow.parentRunId": self.parent_run_id,
            _STUDY_TAG: self._study_id,
            _TRIAL_TAG: str(number),
            "outcome": RUNNING,
            "layout": candidate.label(world_size),
            "memory_settings": candidate.memory_label(),
        }
        run = self._client.create_run(
            self._experiment_id, tags=tags, run_name=f"trial {number:04d}: {tags['layout']}"
        )
        flat = {**candidate.to_flat(), "world_size": world_size}
        params = [Param(name, _param_text(value)) for name, value in flat.items()]
        self._client.log_batch(run.info.run_id, params=params)
        self._children[number] = run.info.run_id
        return str(run.info.run_id)

    def _write(self, record: TrialRecord, world_size: int) -> None:
        run_id = self._children.get(record.number)
        if run_id is None:
            run_id = self._create_child(record.number, record.candidate, world_size)
        if record.measurement is not None:
            self._log_metrics(run_id, metrics_of(record.measurement))
            self._log_series(run_id, record.measurement)
        self._client.set_tag(run_id, "outcome", record.outcome)
        self._client.set_tag(run_id, "reason", record.reason[:4000])
        self._client.set_terminated(run_id, _RUN_STATUS.get(record.outcome, "FAILED"))

    def _log_metrics(self, run_id: str, metrics: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        self._client.log_batch(run_id, metrics=[Metric(k, v, now, 0) for k, v in metrics.items()])

    def _log_series(self, run_id: str, measurement: Measurement) -> None:
        """Loss of every step and step time of every measured one, as series over steps."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        first = len(measurement.losses) - len(measurement.step_times_s)
        series = [Metric("loss", v, now, i) for i, v in enumerate(measurement.losses)]
        series += [
            Metric("measured_step_time_s", v, now, first + i)
            for i, v in enumerate(measurement.step_times_s)
        ]
        self._client.log_batch(run_id, metrics=series[:1000])

    def _find(self, condition: str) -> list[Any]:
        found: list[Any] = []
        token = None
        while True:
            page = self._client.search_runs(
                [self._experiment_id], condition, max_results=1000, page_token=token
            )
            found += page
            token = page.token
            if not token:
                return found

    def _try(self, call: Callable[[], object]) -> None:
        try:
            call()
        except Exception as error:
            # Any store may fail in any way; trials must go on, and reconcile() makes up for it.
            if not self._complained:
                _LOG.warning(
                    "MLflow did not take a record (%s); `tuner tune --resume` writes it again",
                    error,
                )
            self._complained = True


def metrics_of(measurement: Measurement) -> dict[str, float]:
    """The MLflow metrics of a measurement; memory in GiB (2^30 bytes)."""
    metrics = {
        "tflops_per_gpu": measurement.tflops_per_gpu,
        "tokens_per_s_per_gpu": measurement.tokens_per_s_per_gpu,
        "step_time_s": measurement.step_time_s,
        "step_time_spread_s": measurement.step_time_spread_s,
        "peak_memory_allocated_gib": measurement.peak_memory_allocated_bytes / _GIB,
    }
    if measurement.peak_memory_reserved_bytes is not None:
        metrics["peak_memory_reserved_gib"] = measurement.peak_memory_reserved_bytes / _GIB
    return metrics


def open_records(
    uri: str, experiment: str, *, study_id: str, name: str, study_dir: Path
) -> StudyRecords:
    """Open or create the study's parent run in an MLflow store.

    Raises EnvironmentLacksError where the store cannot be reached.
    """
    _quiet_mlflow()
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException

    try:
        client = MlflowClient(tracking_uri=uri)
        experiment_id = _experiment(client, experiment, uri, study_dir)
        found = client.search_runs(
            [experiment_id], f"tags.{_STUDY_TAG} = '{study_id}' and tags.`tuner.kind` = 'study'"
        )
        if found:
            run_id = found[0].info.run_id
        else:
            tags = {_STUDY_TAG: study_id, "tuner.kind": "study", "study_dir": str(study_dir)}
            run_id = client.create_run(experiment_id, tags=tags, run_name=name).info.run_id
        return StudyRecords(client, experiment_id, study_id, run_id)
    except (MlflowException, OSError) as error:
        first_line = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise EnvironmentLacksError(
            f"the MLflow store {shown_uri(uri)} cannot be used: "
            f"{first_line.replace(uri, shown_uri(uri))} "
            "(start the server, or leave `tracking.uri` out for a local file)"
        ) from None


def _experiment(client: MlflowClient, name: str, uri: str, study_dir: Path) -> str:
    """The experiment's id, created if missing; a local store keeps artifacts beside itself."""
    found = client.get_experiment_by_name(name)
    if found is not None:
        return str(found.experiment_id)
    local = uri == default_uri(study_dir)
    location = (study_dir.resolve() / "artifacts").as_uri() if local else None
    return str(client.create_experiment(name, artifact_location=location))


def _quiet_mlflow() -> None:
    """Bound how long MLflow retries; no migration log, no usage statistics."""
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "3")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
    os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    for name in ("mlflow", "alembic"):
        logging.getLogger(name).setLevel(logging.ERROR)


def _param_text(value: object) -> str:
    if isinstance(value, list):
        return ",".join(str(v) for v in value) or "[]"
    return str(value)
