"""Learn from the trials of a study as they finish."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tuner.errors import InputError
from tuner.timing.calibration import Calibration
from tuner.timing.fitting import refine
from tuner.timing.observations import Observation, predictor

if TYPE_CHECKING:
    from tuner.timing.fitting import Predict


def refined(calibration: Calibration, trials: Sequence[Observation]) -> Calibration:
    """The calibration after further trials; those that the model cannot time teach nothing.

    Each trial is to be given once: what a calibration knows is the prior of the next refinement,
    so that one trial at a time comes to where all of them together would.
    """
    import numpy as np

    from tuner.memory import UnsupportedError
    from tuner.memory.worker_pool import DryRunError

    kept: list[Observation] = []
    for trial in trials:
        try:
            predict: Predict = predictor([trial], calibration)
            if np.isfinite(predict(calibration.rates)).all():
                kept.append(trial)
        except (UnsupportedError, DryRunError, InputError):
            continue
    if not kept:
        return calibration
    return refine(calibration, predictor(kept, calibration), [trial.step_time_s for trial in kept])
