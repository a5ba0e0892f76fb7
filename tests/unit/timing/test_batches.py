"""Kernels of larger micro-batches against those that a dry run records."""

from dataclasses import replace

import numpy as np
import pytest

from tuner.candidate import Candidate
from tuner.models import ModelSpec
from tuner.timing.batches import with_batch
from tuner.timing.units import model_kernels

DENSE = ModelSpec.from_flat(
    {
        "num_layers": 2,
        "hidden_size": 256,
        "num_attention_heads": 8,
        "num_query_groups": 4,
        "kv_channels": 32,
        "ffn_hidden_size": 512,
        "vocab_size": 1024,
        "position_embedding_type": "rope",
    }
)
MODELS = {
    "dense": (DENSE, {}),
    "sharded": (
        DENSE,
        {"tensor_model_parallel_size": 2, "sequence_parallel": True, "context_parallel_size": 2},
    ),
    "experts": (
        replace(DENSE, num_moe_experts=8, moe_router_topk=2, moe_ffn_hidden_size=128),
        {"expert_model_parallel_size": 2},
    ),
    "experts recomputed": (
        replace(DENSE, num_moe_experts=4, moe_router_topk=2, moe_ffn_hidden_size=128),
        {"recompute_granularity": "selective", "recompute_modules": ["moe_act", "layernorm"]},
    ),
    "fp8": (DENSE, {"fp8": "hybrid", "fp8_recipe": "tensorwise"}),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("batch", [2, 4, 8])
def test_a_larger_micro_batch_has_the_kernels_of_its_dry_run(name, batch):
    model, flat = MODELS[name]

    def kernels(size):
        candidate = Candidate.from_flat({**flat, "micro_batch_size": size})
        return model_kernels(model, candidate, seq_length=512, precision="bf16")

    one, two = kernels(1), kernels(2)
    found, real = with_batch(one, two, batch), kernels(batch)
    assert found is not None
    assert found.hidden_bytes == real.hidden_bytes
    for unit, expected in real.units.items():
        for phase in ("forward", "backward"):
            mine, theirs = getattr(found.units[unit], phase), getattr(expected, phase)
            for column in ("kind", "dtype", "op", "group", "m", "n", "k", "batch"):
                np.testing.assert_array_equal(getattr(mine, column), getattr(theirs, column))
            np.testing.assert_allclose(mine.flops, theirs.flops, rtol=1e-6)
            # Small operations at the model's ends read a little more of several sequences.
            large = theirs.bytes > 0.05 * theirs.bytes.sum()
            apart = 0.2 if unit == "embedding" else 0.001
            np.testing.assert_allclose(mine.bytes[large], theirs.bytes[large], rtol=apart)
            assert (mine.bytes >= 0).all()
        np.testing.assert_array_equal(found.units[unit].scope, expected.scope)
        np.testing.assert_array_equal(found.units[unit].recomputed, expected.recomputed)


def test_other_operations_cannot_be_continued():
    candidate = Candidate.from_flat({"micro_batch_size": 1})
    one = model_kernels(DENSE, candidate, seq_length=512, precision="bf16")
    unit = one.units["dense"]
    shorter = replace(unit, forward=unit.forward.select(slice(0, -1)))
    other = replace(one, units={**one.units, "dense": shorter})
    assert with_batch(one, other, 4) is None
    assert with_batch(one, replace(one, units={}), 4) is None
