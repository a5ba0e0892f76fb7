"""MLflow records of a study: one parent run, one child run per trial.

Params are the flat candidate, metrics the measured figures, tags the outcome and layout, artifacts
the evidence of failures. Everything goes through a spool in the study directory: trials never wait
for the store, and what it misses while it is away arrives later, once, in order. Run names and tags
identify study and trial, so that a study can be reopened and its records completed.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from tuner.candidate import Candidate
from tuner.errors import EnvironmentLacksError
from tuner.measurement import Measurement, write_json_atomically
from tuner.search.records import RUNNING, TrialRecord
from tuner.tracking.figures import expected_metrics, rank_series
from tuner.tracking.names import STUDY_TAG
from tuner.tracking.spool import Spool
from tuner.tracking.writer import MlflowWriter

_LOG = logging.getLogger(__name__)
_GIB = 2**30
_LAST_WAIT_S = 120.0
"""Without a record taken, when the study ends: a server that comes back takes its time to answer,
and the client's own pauses between attempts add up to half a minute."""
_STACKS = "stacks.txt"


def default_uri(study_dir: Path) -> str:
    """The SQLite store inside a study directory."""
    return f"sqlite:///{study_dir.resolve()}/mlflow.db"


def shown_uri(uri: str) -> str:
    """A tracking URI without the user name and password it may carry."""
    scheme, separator, rest = uri.partition("://")
    return f"{scheme}{separator}{rest.rpartition('@')[2]}"


class StudyRecords:
    """The MLflow side of one study. Open it with `open_records`, close it at the end."""

    def __init__(self, writer: MlflowWriter, study_dir: Path) -> None:
        self._study_dir = study_dir
        self._spool = Spool(study_dir / "mlflow-spool.jsonl", writer.write)
        self._started = {int(r["number"]) for r in self._spool.records() if r["kind"] == "start"}
        self._ended = {int(r["number"]) for r in self._spool.records() if r["kind"] == "end"}
        self._spool.start()

    def start_trial(self, number: int, candidate: Candidate, world_size: int) -> None:
        """Create the trial's child run with its params and layout tags; it is RUNNING."""
        flat = {**candidate.to_flat(), "world_size": world_size}
        self._put(
            "start",
            number=number,
            layout=candidate.label(world_size),
            memory_settings=candidate.memory_label(),
            params={name: _param_text(value) for name, value in flat.items()},
        )
        self._started.add(number)

    def end_trial(self, record: TrialRecord, world_size: int) -> None:
        """Write a finished trial's outcome, figures and evidence and end its run."""
        if record.number not in self._started:
            self.start_trial(record.number, record.candidate, world_size)
        measured = record.measurement
        self._put(
            "end",
            number=record.number,
            outcome=record.outcome,
            reason=record.reason[:4000],
            metrics=({} if measured is None else metrics_of(measured)) | expected_metrics(record),
            ranks=rank_series(record),
            losses=[] if measured is None else list(measured.losses),
            step_times_s=[] if measured is None else list(measured.step_times_s),
            evidence=dict(record.evidence),
            artifacts=[str(path) for path in self._artifacts(record)],
        )
        self._ended.add(record.number)

    def reconcile(
        self, records: Iterable[TrialRecord], world_size_of: Callable[[Candidate], int]
    ) -> None:
        """Bring MLflow to what the study says: missing runs are made, unended ones ended."""
        for record in records:
            if record.outcome != RUNNING and record.number not in self._ended:
                self.end_trial(record, world_size_of(record.candidate))

    def finish(
        self,
        status: str,
        metrics: Mapping[str, float],
        artifacts: Iterable[Path],
        *,
        note: str = "",
        model: str = "",
    ) -> None:
        """End the parent run ("FINISHED" or "KILLED") with the best figures, files and folders.

        `note` is Markdown shown with the run. With `model` the exports among the artifacts become
        a version of the registered model of that name, under the alias "best".
        Waits a while for everything to arrive, and says so where it does not.
        """
        paths = [str(path) for path in artifacts]
        self._put(
            "finish",
            status=status,
            metrics=dict(metrics),
            artifacts=paths,
            note=note,
            model=model,
        )
        if not self._spool.drained(_LAST_WAIT_S):
            _LOG.warning(
                "MLflow is not there: its records stay in %s; `tuner tune --resume %s` sends them",
                self._study_dir,
                self._study_dir,
            )

    def reopen(self) -> None:
        """Mark the parent run RUNNING again, for a resumed study."""
        self._put("reopen")

    def close(self) -> None:
        """Stop sending; what has not arrived is kept."""
        self._spool.close()

    def _put(self, kind: str, **content: Any) -> None:
        self._spool.put({"kind": kind, "time_ms": int(time.time() * 1000), **content})

    def _artifacts(self, record: TrialRecord) -> list[Path]:
        """Files that tell how a trial failed besides its evidence: stacks of a hang."""
        stacks = self._study_dir / "trials" / f"{record.number:04d}" / _STACKS
        return [stacks] if stacks.exists() else []


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

    Raises EnvironmentLacksError where the store of a new study cannot be reached. A study that has
    its run already goes on without the store for now.
    """
    _quiet_mlflow()
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException

    known = _known_run(study_dir)
    client = MlflowClient(tracking_uri=uri)
    if known is None:
        try:
            known = _parent_run(client, uri, experiment, study_id, name, study_dir)
        except (MlflowException, OSError) as error:
            first_line = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise EnvironmentLacksError(
                f"the MLflow store {shown_uri(uri)} cannot be used: "
                f"{first_line.replace(uri, shown_uri(uri))} "
                "(start the server, or leave `tracking.uri` out for a local file)"
            ) from None
        write_json_atomically(study_dir / "mlflow.json", known)
    writer = MlflowWriter(client, known["experiment_id"], study_id, known["run_id"])
    return StudyRecords(writer, study_dir)


def _known_run(study_dir: Path) -> dict[str, str] | None:
    try:
        known = json.loads((study_dir / "mlflow.json").read_text())
        return {"experiment_id": str(known["experiment_id"]), "run_id": str(known["run_id"])}
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _parent_run(
    client: Any, uri: str, experiment: str, study_id: str, name: str, study_dir: Path
) -> dict[str, str]:
    """Ids of the study's experiment and run, made where they are missing."""
    experiment_id = _experiment(client, experiment, uri, study_dir)
    found = client.search_runs(
        [experiment_id], f"tags.{STUDY_TAG} = '{study_id}' and tags.`tuner.kind` = 'study'"
    )
    if found:
        run_id = str(found[0].info.run_id)
    else:
        tags = {STUDY_TAG: study_id, "tuner.kind": "study", "study_dir": str(study_dir)}
        run_id = str(client.create_run(experiment_id, tags=tags, run_name=name).info.run_id)
    return {"experiment_id": experiment_id, "run_id": run_id}


def _experiment(client: Any, name: str, uri: str, study_dir: Path) -> str:
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
