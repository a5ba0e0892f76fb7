"""The predicted step of one configuration, pass by pass."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tuner.timing.calibration import Calibration
from tuner.timing.observations import timed_case
from tuner.timing.passes import PARTS
from tuner.timing.schedule import simulate
from tuner.timing.shipped import precision_key, shipped_calibration
from tuner.timing.step import step_detail
from tuner.timing.timeline import trace_document


def predicted_trace(
    document: Mapping[str, Any], calibration: Calibration | None = None
) -> dict[str, Any]:
    """The trace for Perfetto of what `tuner estimate` is asked about.

    Without `calibration` the packaged one of the GPU and precision holds. Raises InputError or
    UnsupportedError for what cannot be timed, ValueError for a schedule that Megatron-Core refuses
    to run.
    """
    case = timed_case(document, calibration)
    if calibration is None:
        precision = precision_key(case.candidate, str(document.get("precision", "bf16")))
        calibration = shipped_calibration(case.gpu.name, precision)
    table = case.table(calibration.rates)
    rows = case.rows(table)
    pipeline, detail = step_detail(
        case.candidate, *rows, table, global_batch_size=case.global_batch_size
    )
    transfer = float(detail.transfer[0])
    step = simulate(
        pipeline,
        detail.forward[0].sum(axis=-1),
        detail.backward[0].sum(axis=-1),
        transfer,
        release_s=None if detail.release is None else detail.release[0],
        hidden_s=None if detail.hidden is None else detail.hidden[0],
    )
    about = {
        "model": case.model.name,
        "config": case.candidate.to_flat(),
        "gpu": case.gpu.name,
        "world_size": case.world_size,
        "global_batch_size": case.global_batch_size,
        "calibration": calibration.source,
    }
    again = detail.backward[0][..., PARTS.index("recompute")]
    return trace_document(pipeline, step, transfer, recompute_s=again, end=detail.end, about=about)
