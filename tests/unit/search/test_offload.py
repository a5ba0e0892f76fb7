"""What offload leaves on the device."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tuner.search.planning.offload import Offload


def test_what_the_optimizers_step_holds_is_no_activation_to_offload() -> None:
    parts = np.array([[4.0, 4.0, 12.0, 10.0, 1.0]] * 2)  # weights, gradients, optimizer, ...
    step = np.array([0.0, 9.0])
    half = np.array([0.5, 0.5])
    moved = replace(Offload.nothing(2), share=half)
    assert moved.remaining(parts, step)[:, 3].tolist() == [5.0, 9.0]
    host = replace(Offload.nothing(2), fraction=half)
    assert host.remaining(parts, step)[:, 2].tolist() == [6.0, 6.0]
