"""Writes spooled records to MLflow so that a record written twice is there once."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tuner.measurement import Outcome
from tuner.redaction import redact, redact_value
from tuner.search.records import RUNNING
from tuner.tracking.artifacts import clean_copy
from tuner.tracking.names import STUDY_TAG, TRIAL_TAG
from tuner.tracking.registry import register_best
from tuner.tracking.spool import Record

if TYPE_CHECKING:
    from mlflow import MlflowClient

_RUN_STATUS = {
    Outcome.COMPLETED.value: "FINISHED",
    Outcome.INTERRUPTED.value: "KILLED",
}  # any other outcome is FAILED
_METRICS_AT_ONCE = 1000  # MLflow's limit for one call


class MlflowWriter:
    """One study's runs. Times are those of the records, so a late record tells the true ones.

    A record is written again where it is not known to have arrived: runs are looked up by trial
    number before they are made, ended runs are left alone, and metrics carry the record's time, by
    which MLflow's database stores drop what they have already.
    """

    def __init__(
        self, client: MlflowClient, experiment_id: str, study_id: str, parent_run_id: str
    ) -> None:
        self._client = client
        self._experiment_id = experiment_id
        self._study_id = study_id
        self._parent_run_id = parent_run_id
        self._children: dict[int, str] = {}

    def write(self, record: Record) -> None:
        """Write one record; raises whatever the store raises."""
        kind = record["kind"]
        if kind == "start":
            self._start(record)
        elif kind == "end":
            self._end(record)
        elif kind == "reopen":
            self._client.update_run(self._parent_run_id, status="RUNNING")
        else:
            self._finish(record)

    def _start(self, record: Record) -> None:
        from mlflow.entities import Param

        run_id = self._child(int(record["number"]))
        if run_id is None:
            run_id = self._create(record)
        params = [
            Param(name, redact_value(value, name)) for name, value in record["params"].items()
        ]
        self._client.log_batch(run_id, params=params)

    def _create(self, record: Record) -> str:
        number = int(record["number"])
        tags = {
            "mlflow.parentRunId": self._parent_run_id,
            STUDY_TAG: self._study_id,
            TRIAL_TAG: str(number),
            "outcome": RUNNING,
            "layout": record["layout"],
            "memory_settings": redact(record["memory_settings"]),
        }
        run = self._client.create_run(
            self._experiment_id,
            start_time=record["time_ms"],
            tags=tags,
            run_name=f"trial {number:04d}: {record['layout']}",
        )
        self._children[number] = str(run.info.run_id)
        return self._children[number]

    def _end(self, record: Record) -> None:
        run_id = self._child(int(record["number"]))
        if run_id is None:
            raise LookupError(f"trial {record['number']} has no run in MLflow")
        if self._client.get_run(run_id).info.status != "RUNNING":
            return
        self._metrics(run_id, record)
        if record["evidence"]:
            self._client.log_dict(run_id, redact_value(record["evidence"]), "evidence.json")
        self._artifacts(run_id, record)
        self._client.set_tag(run_id, "outcome", record["outcome"])
        self._client.set_tag(run_id, "reason", redact(record["reason"]))
        status = _RUN_STATUS.get(record["outcome"], "FAILED")
        self._client.set_terminated(run_id, status, end_time=record["time_ms"])

    def _finish(self, record: Record) -> None:
        self._metrics(self._parent_run_id, record)
        self._artifacts(self._parent_run_id, record)
        if record.get("note"):
            self._client.set_tag(self._parent_run_id, "mlflow.note.content", redact(record["note"]))
        if record.get("model"):
            register_best(self._client, record["model"], self._parent_run_id, self._study_id)
        self._client.set_terminated(
            self._parent_run_id, record["status"], end_time=record["time_ms"]
        )

    def _metrics(self, run_id: str, record: Record) -> None:
        """Figures, then loss and step time as series over steps; warm-up has losses only."""
        from mlflow.entities import Metric

        now = record["time_ms"]
        losses, times = record.get("losses", []), record.get("step_times_s", [])
        first = len(losses) - len(times)
        metrics = [Metric(name, value, now, 0) for name, value in record["metrics"].items()]
        metrics += [Metric("loss", value, now, step) for step, value in enumerate(losses)]
        metrics += [
            Metric("measured_step_time_s", value, now, first + step)
            for step, value in enumerate(times)
        ]
        for name, values in record.get("ranks", {}).items():
            metrics += [Metric(name, value, now, rank) for rank, value in enumerate(values)]
        for start in range(0, len(metrics), _METRICS_AT_ONCE):
            self._client.log_batch(run_id, metrics=metrics[start : start + _METRICS_AT_ONCE])

    def _artifacts(self, run_id: str, record: Mapping[str, Any]) -> None:
        with tempfile.TemporaryDirectory() as folder:
            for path in map(Path, record["artifacts"]):
                if not path.exists():
                    continue
                copy = clean_copy(path, Path(folder))
                if copy.is_dir():
                    self._client.log_artifacts(run_id, str(copy), artifact_path=path.name)
                else:
                    self._client.log_artifact(run_id, str(copy))

    def _child(self, number: int) -> str | None:
        """The trial's run, from memory or from the store."""
        if number not in self._children:
            found = self._client.search_runs(
                [self._experiment_id],
                f"tags.`{STUDY_TAG}` = '{self._study_id}' and tags.`{TRIAL_TAG}` = '{number}'",
            )
            if not found:
                return None
            self._children[number] = str(found[0].info.run_id)
        return self._children[number]
