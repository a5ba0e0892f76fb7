"""The memory-lean layers compute what plain PyTorch computes, gradients included."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trainables.megatron_core.layers import DuplicatedLinear, FusedAttention, FusedNorm

SEQ, BATCH = 12, 2


def norm_config(**fields: Any) -> SimpleNamespace:
    return SimpleNamespace(
        **{
            "normalization": "RMSNorm",
            "layernorm_zero_centered_gamma": False,
            "sequence_parallel": True,
            **fields,
        }
    )


@pytest.mark.parametrize("normalization", ["RMSNorm", "LayerNorm"])
@pytest.mark.parametrize("zero_centered", [False, True])
def test_the_norm_equals_pytorchs(normalization: str, zero_centered: bool) -> None:
    torch.manual_seed(0)
    config = norm_config(normalization=normalization, layernorm_zero_centered_gamma=zero_centered)
    norm = FusedNorm(config, 16, eps=1e-3)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.add_(torch.randn(16))
    ours = torch.randn(SEQ, BATCH, 16, requires_grad=True)
    theirs = ours.detach().clone().requires_grad_()
    weight = (norm.weight.detach() + (1.0 if zero_centered else 0.0)).requires_grad_()
    if normalization == "RMSNorm":
        expected = torch.nn.functional.rms_norm(theirs, (16,), weight, 1e-3)
    else:
        assert norm.bias is not None
        expected = torch.nn.functional.layer_norm(theirs, (16,), weight, norm.bias.detach(), 1e-3)
    output = norm(ours)
    torch.testing.assert_close(output, expected)
    upstream = torch.randn_like(output)
    output.backward(upstream)
    expected.backward(upstream)
    torch.testing.assert_close(ours.grad, theirs.grad)
    torch.testing.assert_close(norm.weight.grad, weight.grad)


def test_the_norm_marks_its_parameters_for_the_tensor_parallel_reduction() -> None:
    norm = FusedNorm(norm_config(normalization="LayerNorm"), 8)
    assert all(parameter.sequence_parallel for parameter in norm.parameters())


def attention(**fields: Any) -> FusedAttention:
    config = SimpleNamespace(
        **{
            "attention_dropout": 0.0,
            "apply_query_key_layer_scaling": False,
            "window_size": None,
            "window_attn_skip_freq": None,
            "num_attention_heads": 4,
            "softmax_type": "vanilla",
            "params_dtype": torch.float32,
            **fields,
        }
    )
    one_rank = SimpleNamespace(tp=SimpleNamespace(size=lambda: 1))
    return FusedAttention(config, 1, None, "self", pg_collection=one_rank)


def plain_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    window: int | None,
    sink: torch.Tensor | None,
) -> torch.Tensor:
    """Causal softmax attention written out, `[s, b, n, d]` to `[s, b, n * dv]`."""
    repeats = query.shape[2] // key.shape[2]
    key, value = (part.repeat_interleave(repeats, 2) for part in (key, value))
    scores = torch.einsum("sbnd,tbnd->bnst", query, key) / math.sqrt(query.shape[-1])
    distance = torch.arange(SEQ).view(-1, 1) - torch.arange(SEQ)
    hidden = (distance < 0) if window is None else (distance < 0) | (distance > window)
    scores = scores.masked_fill(hidden, -math.inf)
    if sink is not None:
        column = sink.view(1, -1, 1, 1).expand(BATCH, -1, SEQ, 1)
        scores = torch.cat([scores, column], -1)
    probabilities = scores.softmax(-1)[..., :SEQ]
    return torch.einsum("bnst,tbnd->sbnd", probabilities, value).flatten(2)


@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize("value_width", [8, 5])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("sink", [False, True])
def test_attention_equals_the_plain_formula(
    groups: int, value_width: int, window: int | None, sink: bool
) -> None:
    torch.manual_seed(0)
    module = attention(
        window_size=None if window is None else (window, 0),
        softmax_type="learnable" if sink else "vanilla",
    )
    offset = None
    if sink:
        assert module.softmax_offset is not None
        with torch.no_grad():
            module.softmax_offset.copy_(torch.randn(4))
        offset = module.softmax_offset.detach().clone().requires_grad_()
    shapes = [(4, 8), (groups, 8), (groups, value_width)]
    ours = [torch.randn(SEQ, BATCH, *shape, requires_grad=True) for shape in shapes]
    theirs = [part.detach().clone().requires_grad_() for part in ours]
    output = module(*ours, attention_mask=None)
    expected = plain_attention(*theirs, window, offset)
    torch.testing.assert_close(output, expected)
    upstream = torch.randn_like(output)
    output.backward(upstream)
    expected.backward(upstream)
    for our, their in zip(ours, theirs, strict=True):
        torch.testing.assert_close(our.grad, their.grad, atol=2e-5, rtol=1e-4)
    if offset is not None:
        torch.testing.assert_close(module.softmax_offset.grad, offset.grad)


def test_attention_stores_grouped_heads_once() -> None:
    """What is saved: query, key, value as they are, the output and one number per query."""
    saved: list[torch.Size] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor.shape)
        return tensor

    shapes = [(4, 8), (2, 8), (2, 8)]
    inputs = [torch.randn(SEQ, BATCH, *shape, requires_grad=True) for shape in shapes]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        attention()(*inputs, attention_mask=None)
    assert sum(shape.numel() for shape in saved) == SEQ * BATCH * (4 * 8 + 2 * 8 * 2 + 4 * 8 + 4)


def test_attention_dropout_is_refused() -> None:
    with pytest.raises(ValueError, match=r"attention_dropout=0.1 is not supported on the CPU"):
        attention(attention_dropout=0.1)


def test_a_duplicated_linear_layer_has_the_whole_weight() -> None:
    config = SimpleNamespace(params_dtype=torch.float32, sequence_parallel=True)
    layer = DuplicatedLinear(
        6,
        3,
        config=config,
        init_method=torch.nn.init.ones_,
        parallel_mode="duplicated",
        bias=False,
        tp_group=None,
    )
    output, bias = layer(torch.ones(2, 6))
    assert bias is None
    assert output.tolist() == [[6.0] * 3] * 2
    assert layer.weight.sequence_parallel
