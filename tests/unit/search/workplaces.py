"""Places at which spaces are planned."""

from __future__ import annotations

from typing import Any

from tuner.hardware import get_gpu
from tuner.models import ModelSpec
from tuner.search.planning.workplace import Workplace
from tuner.timing.shipped import shipped_calibration


def h100_node(fields: dict[str, Any], *, gpus: int, length: int, batch: int) -> Workplace:
    """One node of H100 that trains a model of these fields in BF16."""
    return Workplace(
        model=ModelSpec.from_flat(fields),
        gpu=get_gpu("h100"),
        gpus_per_node=gpus,
        world_size=gpus,
        seq_length=length,
        global_batch_size=batch,
        precision="bf16",
        rates=shipped_calibration("h100", "bf16").rates,
    )
