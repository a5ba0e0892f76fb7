"""MLflow records while the server is away: kept, then sent once, in order."""

from __future__ import annotations

import threading
import time

import pytest

from tuner.candidate import Candidate
from tuner.measurement import Measurement
from tuner.search.records import TrialRecord
from tuner.tracking.mlflow_records import open_records
from tuner.tracking.spool import Spool

pytestmark = pytest.mark.slow


def a_record(number: int) -> TrialRecord:
    candidate = Candidate.from_flat({"micro_batch_size": number + 1})
    measured = Measurement(0.5, 0.1, 100.0, 2.0 + number, 2**30, None, (3.0, 2.0), (0.5,), ())
    return TrialRecord(number, candidate, "completed", "", 1.0, measured)


@pytest.fixture
def server(tmp_path, monkeypatch):
    """MLflow's own server application on a port, to be taken down and up again."""
    from werkzeug.serving import make_server

    monkeypatch.setenv("_MLFLOW_SERVER_FILE_STORE", f"sqlite:///{tmp_path}/server.db")
    monkeypatch.setenv("_MLFLOW_SERVER_ARTIFACT_ROOT", str(tmp_path / "artifacts"))
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "120")
    from mlflow import MlflowClient
    from mlflow.server import app

    # Makes the database, which takes longer than all requests together.
    MlflowClient(tracking_uri=f"sqlite:///{tmp_path}/server.db").search_experiments()

    class Server:
        port = 0

        def up(self) -> None:
            self._server = make_server("127.0.0.1", self.port, app, threaded=True)
            self.port = self._server.port
            threading.Thread(target=self._server.serve_forever, daemon=True).start()

        def down(self) -> None:
            self._server.shutdown()
            self._server.server_close()

    server = Server()
    server.up()
    yield server
    server.down()


def runs(uri):
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("e").experiment_id
    found = client.search_runs([experiment], max_results=100)
    return client, [run for run in found if "tuner.trial" in run.data.tags]


def test_records_of_an_outage_arrive_once_in_order_with_their_true_times(server, tmp_path):
    uri = f"http://127.0.0.1:{server.port}"
    study = tmp_path / "study"
    study.mkdir()
    where = {"study_id": "s", "name": "n", "study_dir": study}
    records = open_records(uri, "e", **where)
    records.start_trial(0, a_record(0).candidate, 1)
    assert records._spool.drained(60)
    server.down()
    before = int(time.time() * 1000)
    records.end_trial(a_record(0), 1)
    records.end_trial(a_record(1), 1)
    during = time.time() * 1000
    assert not records._spool.drained(2)
    records.close()  # the driver is gone, too

    again = open_records(uri, "e", **where)  # the server is still away
    again.end_trial(a_record(2), 1)
    server.up()
    assert again._spool.drained(60)
    again.reconcile([a_record(number) for number in range(3)], lambda candidate: 1)
    assert again._spool.drained(1)
    again.close()

    client, found = runs(uri)
    found.sort(key=lambda run: run.info.start_time)
    assert [run.data.tags["tuner.trial"] for run in found] == ["0", "1", "2"]
    for number, run in enumerate(found):
        assert run.info.status == "FINISHED"
        history = client.get_metric_history(run.info.run_id, "tflops_per_gpu")
        assert [metric.value for metric in history] == [2.0 + number]
    assert before <= found[0].info.end_time <= during


def test_a_slow_store_is_waited_for_as_long_as_it_takes_records(tmp_path):
    spool = Spool(tmp_path / "spool.jsonl", lambda record: time.sleep(0.3))
    for number in range(5):
        spool.put({"kind": str(number)})
    spool.start()
    assert spool.drained(1.0)
    spool.close()


def test_a_record_cut_short_by_a_kill_is_dropped_and_the_rest_arrives(tmp_path):
    path = tmp_path / "spool.jsonl"
    first = Spool(path, lambda record: None)
    first.put({"kind": "a"})
    first.close()
    with path.open("a") as handle:
        handle.write('{"kind": "b"')
    arrived = []
    second = Spool(path, arrived.append)
    second.put({"kind": "c"})
    second.start()
    assert second.drained(10)
    second.close()
    assert [record["kind"] for record in arrived] == ["a", "c"]
