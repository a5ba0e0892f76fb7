"""Functions taken as one kernel."""

from __future__ import annotations

import pytest
import torch

from tuner.memory.fusion import fused
from tuner.memory.recorder import Recorder
from tuner.memory.values import KnownValues

SHAPE = (64, 32)
BYTES = 64 * 32 * 4


def write_then_scale(values: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    values[rows, rows] -= 1.0
    values.mul_(2.0)
    return values.to(torch.bfloat16)


def scale_then_write(values: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    narrow = values.to(torch.bfloat16)
    values[rows, rows] = 1.0
    return narrow


def scale(values: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return (values * 2.0 + 1.0).to(torch.bfloat16)


@pytest.mark.parametrize(
    ("function", "copies"), [(write_then_scale, 1), (scale_then_write, 0), (scale, 0)]
)
def test_an_argument_is_copied_where_a_write_by_index_is_not_the_last(function, copies) -> None:
    recorder = Recorder(host_counts=False, handlers={}, values=KnownValues(None))
    with recorder.recording():
        values = torch.empty(SHAPE, dtype=torch.float32, device="meta")
        rows = torch.empty(8, dtype=torch.int64, device="meta")
        before = recorder.current_bytes
        result = fused(function)(values, rows)
    live = recorder.trace().live_bytes()
    assert live.max() - before == BYTES // 2 + copies * BYTES
    assert result.dtype is torch.bfloat16
