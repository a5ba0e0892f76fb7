"""What MLflow is told, and what is kept from it."""

import pytest

from tuner.measurement import Measurement
from tuner.tracking.mlflow_records import metrics_of, shown_uri


@pytest.mark.parametrize(
    ("uri", "shown"),
    [
        ("https://me:secret@mlflow.example:5000/x", "https://mlflow.example:5000/x"),
        ("postgresql://u:p%40ss@db/mlflow", "postgresql://db/mlflow"),
        ("sqlite:////tmp/study/mlflow.db", "sqlite:////tmp/study/mlflow.db"),
        ("mlruns", "mlruns"),
    ],
)
def test_credentials_of_a_tracking_uri_are_not_shown(uri, shown):
    assert shown_uri(uri) == shown


def test_memory_metrics_are_in_gib_and_absent_where_not_measured():
    measurement = Measurement(0.5, 0.1, 100.0, 2.0, 3 * 2**30, None, (1.0,), (0.5,), ())
    metrics = metrics_of(measurement)
    assert metrics["peak_memory_allocated_gib"] == 3.0
    assert "peak_memory_reserved_gib" not in metrics
