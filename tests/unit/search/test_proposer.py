"""Choices from estimates and results, on made-up machines whose errors have a physical cause."""

import itertools

import numpy as np

from tuner.candidate import Candidate
from tuner.search.acquisition import Goal, area, area_added
from tuner.search.estimates import Estimates, no_estimates
from tuner.search.knowledge import Seen
from tuner.search.pool import Pool
from tuner.search.proposer import Proposer
from tuner.search.table import CandidateTable

LIMIT = 80.0


def candidates() -> list[Candidate]:
    sizes = itertools.product((1, 2, 4, 8), (1, 2, 4), (1, 2, 4), (None, "selective"))
    return [
        Candidate.from_flat(
            {
                "tensor_model_parallel_size": tensor,
                "pipeline_model_parallel_size": stages,
                "micro_batch_size": batch,
                "recompute_granularity": recompute,
                **({"recompute_modules": ["mlp"]} if recompute else {}),
            }
        )
        for tensor, stages, batch, recompute in sizes
    ]


def machine(all_candidates, *, link_factor: float = 1.0, memory_factor: float = 1.0) -> Estimates:
    """A machine whose tensor-parallel links and memory use differ from the nominal ones."""
    tensor, stages, batch, recompute = (
        np.array(column, dtype=float)
        for column in zip(
            *(
                (
                    c.tensor_model_parallel_size,
                    c.pipeline_model_parallel_size,
                    c.micro_batch_size,
                    c.recompute_granularity is not None,
                )
                for c in all_candidates
            ),
            strict=True,
        )
    )
    time = {
        "compute": 8 * (1 + 0.15 * recompute) * (1 + 0.2 / batch),
        "tensor parallel": link_factor * 0.6 * (tensor - 1),
        "bubble": 0.15 * (stages - 1) * batch,
    }
    memory = {
        "state": memory_factor * 160 / (tensor * stages),
        "activations": memory_factor * 40 * batch * (1 - 0.4 * recompute) / tensor,
    }
    return Estimates(sum(time.values()), sum(memory.values()), time, memory)


def search(truth: Estimates, pool: Pool, trials: int, goal: Goal | None = None) -> list[Seen]:
    proposer, seen = Proposer(pool, goal), []
    for _ in range(trials):
        choice = proposer.choose(seen)
        assert choice is not None
        row, peak = choice.row, float(truth.memory_bytes[choice.row])
        fits = peak <= LIMIT
        time = float(truth.step_time_s[row]) if fits else None
        seen.append(Seen(row, time, peak if fits else None, fits))
    return seen


def pool_of(estimates=machine, **changes) -> Pool:
    table = CandidateTable.of(candidates())
    return Pool(table, estimates(table.candidates), LIMIT, [64] * len(table), **changes)


def test_a_wrong_link_speed_is_learned_in_a_few_trials():
    pool = pool_of()
    truth = machine(pool.table.candidates, link_factor=5.0)
    fitting = truth.step_time_s[truth.memory_bytes <= LIMIT]
    believed = np.where(pool.estimates.memory_bytes <= LIMIT, pool.estimates.step_time_s, np.inf)
    assert truth.step_time_s[believed.argmin()] > 1.2 * fitting.min()  # the estimate misleads
    seen = search(truth, pool, 5)
    assert min(s.step_time_s for s in seen if s.fits) <= 1.01 * fitting.min()


def test_memory_above_the_estimate_costs_at_most_two_launches():
    pool = pool_of()
    truth = machine(pool.table.candidates, memory_factor=1.12)
    seen = search(truth, pool, 8)
    assert sum(s.fits is False for s in seen) <= 2
    fitting = truth.step_time_s[truth.memory_bytes <= LIMIT]
    assert min(s.step_time_s for s in seen if s.fits) <= 1.03 * fitting.min()


def test_running_trials_are_not_proposed_again_and_others_beside_them_differ():
    proposer = Proposer(pool_of())
    running: list[int] = []
    for _ in range(12):
        choice = proposer.choose([], running)
        assert choice is not None
        assert choice.row not in running
        running.append(choice.row)
    chosen = [proposer.pool.table.candidates[row] for row in running]
    assert len({c.tensor_model_parallel_size for c in chosen}) > 1


def test_out_of_memory_rules_out_what_provably_needs_as_much():
    pool = pool_of()
    proposer = Proposer(pool)
    lean = next(
        row
        for row, c in enumerate(pool.table.candidates)
        if c.recompute_granularity and c.micro_batch_size == 1 and c.model_parallel_size() == 1
    )
    (control,) = proposer.ruled_out_by(lean)
    assert pool.table.candidates[control].recompute_granularity is None
    left = proposer.open_rows(proposer.know([Seen(lean, None, None, False)]))
    assert {lean, control}.isdisjoint(left)
    assert len(left) == len(pool) - 2


def test_the_control_without_recomputation_follows_a_recomputed_start():
    pool = pool_of()
    proposer = Proposer(pool)
    row = next(
        r
        for r, c in enumerate(pool.table.candidates)
        if c.recompute_granularity and c.model_parallel_size() == 32 and c.micro_batch_size == 1
    )
    time = float(pool.estimates.step_time_s[row])
    choice = proposer.choose([Seen(row, time, None, True)])
    assert choice.reason == "control without recomputation"
    control = pool.table.candidates[choice.row]
    assert control.recompute_granularity is None
    assert control.model_parallel_size() == 32


def test_without_estimates_the_guide_decides():
    first = Proposer(pool_of(no_estimates)).choose([])
    assert first is not None
    pool = pool_of(no_estimates)
    assert pool.table.candidates[first.row].recompute_granularity is None


def test_small_trials_are_preferred_where_they_teach_as_much():
    table = CandidateTable.of(
        Candidate.from_flat({"micro_batch_size": 2, "world_size": size}) for size in (64, 512)
    )
    same = Estimates(np.array([8.0, 1.0]), np.array([10.0, 10.0]))
    pool = Pool(table, same, LIMIT, [64, 512])
    choice = Proposer(pool).choose([])
    assert pool.gpus[choice.row] == 64


def test_an_exhausted_pool_has_no_choice():
    pool = pool_of()
    everything = [Seen(row, 1.0, 1.0, True) for row in range(len(pool))]
    assert Proposer(pool).choose(everything) is None


def test_the_leanest_candidate_above_a_floor_is_found():
    pool = pool_of()
    truth = machine(pool.table.candidates, link_factor=1.5)
    gpu_seconds = truth.step_time_s * 64
    floor = float(np.quantile(gpu_seconds, 0.3))
    leanest = truth.memory_bytes[gpu_seconds <= floor].min()
    seen = search(truth, pool, 12, Goal("memory", floor))
    reached = [
        s.memory_bytes for s in seen if s.fits and s.step_time_s and s.step_time_s * 64 <= floor
    ]
    assert min(reached) <= 1.05 * leanest


def test_the_trade_off_is_covered_by_few_trials():
    pool = pool_of()
    truth = machine(pool.table.candidates, link_factor=1.5)
    points = np.log(np.stack([truth.step_time_s, truth.memory_bytes], axis=1))
    corner = (float(points[:, 0].max()), float(np.log(LIMIT)))
    seen = search(truth, pool, 12, Goal("pareto"))
    found = np.log([(s.step_time_s, s.memory_bytes) for s in seen if s.fits])
    assert area(found, corner) >= 0.9 * area(points, corner)


def test_the_area_of_two_objectives_is_the_union_of_their_rectangles():
    points = np.array([[1.0, 3.0], [2.0, 1.0], [2.5, 2.0], [5.0, 0.0]])
    assert area(points, (4.0, 4.0)) == 3.0 * 1.0 + 2.0 * 2.0


def test_the_area_a_point_adds_is_that_with_it_less_that_without_it():
    generator = np.random.default_rng(1)
    points, more = generator.random((6, 2)), generator.random((20, 2))
    corner = (0.9, 0.8)
    added = area_added(points, more[:, 0], more[:, 1], corner)
    before = area(points, corner)
    expected = [area(np.vstack([points, one]), corner) - before for one in more]
    np.testing.assert_allclose(added, expected, atol=1e-12)
