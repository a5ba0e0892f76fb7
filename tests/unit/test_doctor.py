"""`tuner doctor` on machines that lack something."""

from __future__ import annotations

import http.server
import threading

import pytest

from tuner.commands import doctor


@pytest.fixture
def server():
    """An MLflow-like server that answers with the status it is told."""

    class Handler(http.server.BaseHTTPRequestHandler):
        status = 200

        def do_GET(self) -> None:
            self.send_response(self.status)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    running = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=running.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{running.server_port}", Handler
    running.shutdown()
    running.server_close()


def tracking(uri: str | None) -> doctor.Check:
    return next(check for check in doctor.examine(uri) if check.name == "mlflow tracking")


def test_a_server_that_answers_is_fine_and_one_that_wants_a_login_says_so(server) -> None:
    address, handler = server
    assert tracking(address).status == "ok"
    handler.status = 401
    check = tracking(address)
    assert check.status == "problem"
    assert "MLFLOW_TRACKING_USERNAME" in check.command


def test_a_server_out_of_reach_is_a_problem_with_a_command() -> None:
    check = tracking("http://127.0.0.1:9")
    assert check.status == "problem"
    assert "mlflow server" in check.command


def test_a_missing_package_names_its_installation(monkeypatch, capsys) -> None:
    package = doctor._Package("no-such-package", "no_such_module", "x", True, "pip install it")
    monkeypatch.setattr(doctor, "_PACKAGES", (package,))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert doctor.run_doctor(None, as_json=False) == 3
    assert "pip install it" in capsys.readouterr().out
