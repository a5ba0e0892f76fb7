"""What each low-precision recipe keeps, against arithmetic on shapes.

One layer of width 256 and MLP width 1024 with 4 heads in 2 groups, sequence 256, one micro-batch.
"""

from __future__ import annotations

from functools import cache

import pytest

from tuner.candidate import Candidate
from tuner.errors import InputError
from tuner.memory import DryRun, dry_run
from tuner.memory.te import state
from tuner.memory.te.quantized import GRADIENT, INPUT, WEIGHT, gathered, quantize, quantize_parts
from tuner.memory.te.recipes import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
)
from tuner.models import ModelSpec

_WIDTH, _MLP, _TOKENS, _VOCABULARY = 256, 1024, 256, 512
_MATRICES = {"qkv": 2 * _WIDTH, "proj": _WIDTH, "fc1": 2 * _MLP, "fc2": _MLP}
_WEIGHTS = _WIDTH * sum(_MATRICES.values())

_MODEL = ModelSpec.from_flat(
    {
        "num_layers": 1,
        "hidden_size": _WIDTH,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "ffn_hidden_size": _MLP,
        "gated_linear_unit": True,
        "activation_func": "silu",
        "add_bias_linear": False,
        "normalization": "RMSNorm",
        "vocab_size": _VOCABULARY,
        "position_embedding_type": "rope",
        "max_position_embeddings": 4096,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }
)


@cache
def _run(architecture: str, te_version: str = "2.9.0", **config: object) -> DryRun:
    candidate = Candidate.from_flat({"micro_batch_size": 1, **config})
    return dry_run(
        _MODEL,
        candidate,
        world_size=1,
        seq_length=_TOKENS,
        global_batch_size=2,
        architecture=architecture,
        te_version=te_version,
    )


@pytest.fixture
def on_gpu(request: pytest.FixtureRequest):
    state.reset("2.9.0", request.param)
    yield request.param
    state.reset("2.9.0", "hopper")


def _bytes(tensors: list) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@pytest.mark.parametrize(
    ("on_gpu", "recipe", "role", "rows", "columns"),
    [
        # 384 x 640: data, then scales padded as the GEMMs want them
        ("hopper", DelayedScaling(), INPUT, 384 * 640, 384 * 640),
        ("blackwell", Float8CurrentScaling(), INPUT, 384 * 640, 0),
        ("blackwell", MXFP8BlockScaling(), INPUT, 384 * (640 + 20), 384 * 640 + 12 * 640),
        ("hopper", Float8BlockScaling(), INPUT, 384 * 640 + 4 * 5 * 384, 384 * 640 + 4 * 3 * 640),
        ("hopper", Float8BlockScaling(), WEIGHT, 384 * 640 + 4 * 3 * 8, 384 * 640 + 4 * 5 * 4),
        (
            "blackwell",
            NVFP4BlockScaling(),
            GRADIENT,
            384 * 320 + 384 * 40 + 4,
            640 * 192 + 640 * 24 + 4,
        ),
    ],
    indirect=["on_gpu"],
)
def test_a_copy_holds_data_and_padded_scales(
    on_gpu: str, recipe: Recipe, role: str, rows: int, columns: int
) -> None:
    copy = quantize(recipe, role, (384, 640), rows=True, columns=True)
    assert _bytes(copy.rows) == rows
    assert _bytes(copy.columns) == columns
    copy.only_columns()
    assert _bytes(copy.rows) == (0 if columns else rows)


@pytest.mark.parametrize("on_gpu", ["hopper"], indirect=True)
def test_experts_share_one_buffer_for_each_direction(on_gpu: str) -> None:
    copy = quantize_parts(Float8BlockScaling(), 512, [128, 256], INPUT, rows=True, columns=True)
    assert len(copy.rows) == len(copy.columns) == 1
    assert _bytes(copy.rows) == 384 * 512 + 4 * 4 * 384
    per_tensor = quantize_parts(DelayedScaling(), 512, [128, 256], INPUT, rows=True, columns=True)
    assert [_bytes([tensor]) for tensor in per_tensor.rows] == [128 * 512, 256 * 512]


@pytest.mark.parametrize("on_gpu", ["hopper"], indirect=True)
def test_a_gathered_copy_is_transposed_after_the_gather(on_gpu: str) -> None:
    source = quantize(DelayedScaling(), INPUT, (64, 128), rows=True, columns=False)
    whole = gathered(source, 4, columns=False)
    assert _bytes(whole.rows) == 4 * 64 * 128
    assert not whole.columns
    whole.add_columns()
    assert _bytes(whole.columns) == 4 * 64 * 128


@pytest.mark.parametrize(
    ("architecture", "recipe", "bytes_each"),
    [
        ("hopper", "delayed", 2.0),  # data and transpose
        ("hopper", "tensorwise", 2.0),
        ("blackwell", "tensorwise", 1.0),  # products read one layout
        ("hopper", "blockwise", 2.0),
        ("blackwell", "mxfp8", 2.0625),  # and a scale byte for each 32
    ],
)
def test_weights_have_cached_copies_beside_them(
    architecture: str, recipe: str, bytes_each: float
) -> None:
    plain = _run(architecture)
    low = _run(architecture, fp8="hybrid", fp8_recipe=recipe)
    extra = low.breakdown["weights"] - plain.breakdown["weights"]
    assert extra == pytest.approx(bytes_each * _WEIGHTS, rel=0.03)


@pytest.mark.parametrize(
    ("architecture", "recipe", "settings", "bytes_each", "te_version"),
    [
        ("hopper", "delayed", {}, 2.0, "2.9.0"),
        ("hopper", "tensorwise", {}, 2.0, "2.9.0"),
        ("hopper", "tensorwise", {}, 2.0, "2.11.0"),
        ("blackwell", "tensorwise", {}, 1.0, "2.9.0"),
        ("hopper", "blockwise", {}, 2.0, "2.9.0"),
        ("hopper", "blockwise", {}, 2.0, "2.11.0"),
        # rows and columns of its own; no parameter buffer, which the gradients lend
        ("blackwell", "mxfp8", {"reuse_grad_buf_for_mxfp8_param_ag": True}, 2.0625, "2.9.0"),
    ],
)
def test_weights_in_fp8_have_no_other_copy(
    architecture: str, recipe: str, settings: dict, bytes_each: float, te_version: str
) -> None:
    low = _run(
        architecture, te_version, fp8="hybrid", fp8_recipe=recipe, fp8_param_gather=True, **settings
    )
    # Embedding, head and norms stay in bf16, in a parameter buffer of their own; where the buffer
    # of gradients is lent, Megatron-Core leaves them outside that buffer and makes it all the same.
    others = 2 * (2 * _VOCABULARY * _WIDTH + 3 * _WIDTH) * (2 if settings else 1)
    weights = low.breakdown["weights"] - others
    assert weights == pytest.approx(bytes_each * _WEIGHTS, rel=0.03)


def test_master_weights_and_moments_do_not_depend_on_the_weights_precision() -> None:
    plain = _run("hopper")
    low = _run("hopper", fp8="hybrid", fp8_recipe="tensorwise", fp8_param=True)
    assert low.breakdown["optimizer state"] == pytest.approx(
        plain.breakdown["optimizer state"], rel=0.01
    )


def _kept(run: DryRun, layer: str) -> int:
    """Bytes that a linear layer of the run keeps at the peak, in the backward pass of the MLP."""
    return sum(size for name, size in run.activations.items() if name.endswith(layer))


@pytest.mark.parametrize("layer", ["linear_qkv", "linear_fc1"])
def test_products_keep_one_byte_of_each_input_instead_of_two(layer: str) -> None:
    low = _run("hopper", fp8="hybrid", fp8_recipe="tensorwise")
    saved = _kept(_run("hopper"), layer) - _kept(low, layer)
    assert saved == pytest.approx(_TOKENS * _WIDTH, abs=64)


def test_only_delayed_scaling_copies_the_input_of_the_projection() -> None:
    """Elsewhere it keeps attention's output, which attention keeps anyway."""
    delayed = _run("hopper", fp8="hybrid", fp8_recipe="delayed")
    assert _kept(delayed, "linear_proj") == pytest.approx(_TOKENS * _WIDTH, abs=64)
    assert _kept(_run("hopper", fp8="hybrid", fp8_recipe="tensorwise"), "linear_proj") == 0


def test_first_and_last_layers_may_stay_in_bf16() -> None:
    low = _run("hopper", fp8="hybrid", fp8_recipe="tensorwise", first_last_layers_bf16=True)
    assert low.breakdown["weights"] == _run("hopper").breakdown["weights"]


def test_mxfp8_weights_need_the_gradient_buffer() -> None:
    with pytest.raises(InputError, match="reuse_grad_buf_for_mxfp8_param_ag"):
        _run("blackwell", fp8="e4m3", fp8_recipe="mxfp8", fp8_param_gather=True)


@pytest.mark.parametrize(("recipe", "output_bytes"), [("delayed", 1), ("tensorwise", 2)])
def test_attention_in_fp8_keeps_one_byte_of_query_key_and_value(
    recipe: str, output_bytes: int
) -> None:
    low = _run("hopper", fp8="hybrid", fp8_recipe=recipe, fp8_dot_product_attention=True)
    heads, query, keys_and_values = 4, _WIDTH, _WIDTH
    statistics = 2 * 4 * heads
    expected = _TOKENS * (query + keys_and_values + query * output_bytes + statistics)
    assert _kept(low, "core_attention") == pytest.approx(expected, abs=64)
