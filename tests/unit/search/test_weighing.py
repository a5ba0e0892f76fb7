"""Levers weighed alone and together, by arithmetic that stands for estimates."""

from types import SimpleNamespace

import pytest

from tuner.candidate import Candidate
from tuner.models import get_model
from tuner.search.planning.weighing import Figures, Scales
from tuner.search.validity import ValidityChecker

GIB = 2**30
PLAIN = {"pipeline_model_parallel_size": 2, "micro_batch_size": 2}


class Arithmetic(Scales):
    """Estimates of a few settings: bytes and seconds that each saves or costs."""

    def __init__(self, limit_gib: float) -> None:
        checker = ValidityChecker(
            fixed={
                "num_layers": 32,
                "add_bias_linear": False,
                "seq_length": 4096,
                "global_batch_size": 64,
            },
            world_size=8,
            mcore="0.16.1",
        )
        super().__init__(
            SimpleNamespace(place=SimpleNamespace(model=get_model("llama3-8b"))), checker
        )
        self.limit_gib = limit_gib

    def figures(self, candidates):
        return [self._of(candidate) for candidate in candidates]

    def _of(self, candidate: Candidate) -> Figures:
        flat = candidate.to_flat()
        memory, seconds = 40.0 + 20.0 * candidate.micro_batch_size, 10.0
        seconds += 0.5 if candidate.micro_batch_size == 1 else 0.0
        if flat.get("grad_reduce_in_fp32") is False:
            memory, seconds = memory - 6.0, seconds - 0.1
        modules = candidate.recompute_modules or ()
        memory -= 5.0 * ("core_attn" in modules) + 9.0 * ("mlp" in modules)
        seconds += 0.2 * ("core_attn" in modules) + 1.0 * ("mlp" in modules)
        if candidate.recompute_granularity == "full":
            memory, seconds = memory - 35.0, seconds + 4.0
        return Figures(memory * GIB, self.limit_gib * GIB, seconds, {}, {})


@pytest.mark.parametrize(
    ("limit_gib", "names"),
    [
        # alone: too much but for full recomputation; the narrow ones in addition are enough
        (70.0, {"gradients in the parameters' precision", "recompute core_attn"}),
        (62.0, {"half the micro-batch"}),
        (50.0, {"half the micro-batch", "gradients in the parameters' precision",
                "recompute core_attn"}),
    ],
)  # fmt: skip
def test_the_fastest_combination_that_fits_is_found(limit_gib, names):
    weighing = Arithmetic(limit_gib).weigh(Candidate.from_flat(PLAIN))
    assert not weighing.figures.fits
    better = weighing.better
    assert better is not None
    assert better.figures.fits
    assert names <= set(better.names)
    alone = [w.figures.step_time_s for w in weighing.savers if w.figures.fits]
    assert better.figures.step_time_s <= min(alone, default=float("inf"))


def test_modules_of_several_levers_add_up():
    better = Arithmetic(60.5).weigh(Candidate.from_flat({**PLAIN, "micro_batch_size": 1})).better
    assert better is not None  # it fits as it is, and is faster with narrower gradients
    assert better.names == ("gradients in the parameters' precision",)
    scales = Arithmetic(60.0)
    changed = scales._applied(Candidate.from_flat(PLAIN), ("recompute core_attn", "recompute mlp"))
    assert changed is not None
    assert changed.recompute_modules == ("core_attn", "mlp")


def test_what_costs_memory_is_bought_with_what_saves_it():
    start = {**PLAIN, "recompute_granularity": "full", "recompute_method": "uniform",
             "recompute_num_layers": 1}  # fmt: skip
    better = Arithmetic(76.0).weigh(Candidate.from_flat(start)).better
    assert better is not None
    assert {"recompute nothing", "gradients in the parameters' precision"} <= set(better.names)


def test_nothing_is_better_than_what_cannot_be_improved():
    best = Candidate.from_flat({**PLAIN, "grad_reduce_in_fp32": False})
    assert Arithmetic(90.0).weigh(best).better is None


def test_more_levers_than_are_combined_are_pulled_in_turn():
    weighing = Arithmetic(39.0).weigh(Candidate.from_flat(PLAIN))
    assert weighing.better is not None
    assert weighing.better.figures.fits
    assert len(weighing.better.names) > 1
