"""When trials and searches end early."""

import numpy as np
from test_proposer import LIMIT, machine, pool_of

from tuner.search.knowledge import Seen
from tuner.search.proposer import Proposer
from tuner.search.stopping import cannot_beat, chance_of_improvement


def test_a_run_stops_only_when_its_interval_lies_above_the_bound():
    assert not cannot_beat([2.0], 1.0)
    assert cannot_beat([2.0, 2.001, 1.999], 1.9)
    assert not cannot_beat([2.0, 2.4, 1.6], 1.9)
    assert not cannot_beat([1.8, 1.81, 1.79], 1.9)


def test_the_interval_covers_the_true_mean_as_often_as_it_says():
    generator = np.random.default_rng(0)
    wrong = sum(cannot_beat(list(generator.normal(1.0, 0.05, size=4)), 1.0) for _ in range(4_000))
    assert wrong / 4_000 < 0.01


def test_the_chance_of_improvement_falls_to_nothing_once_the_best_is_known():
    pool = pool_of()
    truth = machine(pool.table.candidates)
    proposer = Proposer(pool)
    assert chance_of_improvement(proposer, []) == 1.0
    fits = truth.memory_bytes <= LIMIT
    order = np.argsort(np.where(fits, truth.step_time_s, np.inf))
    slow = [Seen(int(row), float(truth.step_time_s[row]), None, True) for row in order[30:33]]
    fast = [Seen(int(row), float(truth.step_time_s[row]), None, True) for row in order[:6]]
    before = chance_of_improvement(proposer, slow)
    after = chance_of_improvement(proposer, slow + fast)
    assert before > 0.9
    assert after < 0.05
