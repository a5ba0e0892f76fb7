"""Unit times of settings that follow from those of others."""

from __future__ import annotations

import numpy as np
import pytest

from tuner.candidate import Candidate
from tuner.search.planning.anchors import Recipe
from tuner.search.planning.time_book import UnitFigures, derived_figures
from tuner.timing.passes import PARTS, host_wait, host_work

ONCE, TWICE = Candidate(micro_batch_size=1), Candidate(micro_batch_size=2)
FULL = Candidate(micro_batch_size=1, recompute_granularity="full")


def figures(device_s, host_s, repeated_s=0.0, added_host_s=0.0):
    """One unit whose passes take so long on the device and on the host."""

    def passes(device, host, repeated):
        row = np.zeros((1, len(PARTS)))
        row[0, PARTS.index("compute")], row[0, PARTS.index("recompute")] = device, repeated
        row[0, PARTS.index("host")] = host_wait(host, device + repeated)
        return row

    forward = passes(device_s, host_s, 0.0)
    backward = passes(2 * device_s, 2 * host_s + added_host_s, repeated_s)
    return UnitFigures(forward, backward, np.zeros((1, 2)), np.zeros(3))


@pytest.mark.parametrize(("host", "device"), [(3.0, 1.0), (1.0, 3.0), (0.0, 2.0), (2.0, 0.0)])
def test_the_hosts_time_is_what_passes_wait_for(host, device):
    assert host_work(host_wait(host, device), device) == pytest.approx(host, abs=1e-6)


def test_a_larger_micro_batch_leaves_the_host_as_much_to_launch():
    recipe = Recipe(8, ONCE, ONCE, TWICE, ONCE, ())
    found = derived_figures(recipe, {ONCE: figures(1.0, 3.0), TWICE: figures(2.0, 3.0)})
    expected = figures(8.0, 3.0)
    assert found.forward == pytest.approx(expected.forward)
    assert found.backward == pytest.approx(expected.backward)


def test_recomputation_adds_launches_of_its_own():
    recipe = Recipe(1, ONCE, ONCE, TWICE, ONCE, (FULL,))
    anchors = {ONCE: figures(1.0, 3.0), FULL: figures(1.0, 3.0, repeated_s=1.0, added_host_s=3.0)}
    found = derived_figures(recipe, anchors)
    assert found.backward == pytest.approx(anchors[FULL].backward)
    assert found.forward == pytest.approx(anchors[ONCE].forward)


def test_a_larger_micro_batch_grows_as_on_the_grid_where_it_is_known():
    far = Candidate(micro_batch_size=1, expert_model_parallel_size=16)
    recipe = Recipe(4, far, ONCE, TWICE, ONCE, ())
    anchors = {far: figures(5.0, 0.5), ONCE: figures(1.0, 0.5), TWICE: figures(1.5, 0.5)}
    found = derived_figures(recipe, anchors, figures(3.0, 0.5))
    assert found.forward == pytest.approx(figures(15.0, 0.5).forward)
    line = derived_figures(recipe, anchors)
    assert line.forward == pytest.approx(figures(12.5, 0.5).forward)
