"""Context parallelism by each way of exchange, userbuffers, and other layers and precisions."""

from __future__ import annotations

import pytest
from tiny_models import HIDDEN_BYTES, LAYERS, LENGTH, WIDTH, kept, run

_RANKS = 4
_PART = HIDDEN_BYTES // _RANKS
"""Bytes of this rank's part of the hidden states."""


def context_parallel(kind: str, **config: object):
    return run("plain", context_parallel_size=_RANKS, cp_comm_type=kind, **config)


def test_gathering_keys_keeps_the_output_of_each_half_besides_the_whole() -> None:
    ring, gathered = context_parallel("p2p"), context_parallel("all_gather")
    assert kept(gathered) - kept(ring) == pytest.approx(LAYERS * _PART, rel=0.1)


def test_all_to_all_within_a_ring_keeps_as_much_as_all_to_all() -> None:
    mixed = context_parallel("a2a+p2p", hierarchical_context_parallel_sizes=(2, 2))
    assert kept(mixed) == pytest.approx(kept(context_parallel("a2a")), rel=0.02)


def test_userbuffers_take_what_is_gathered_out_of_the_allocator() -> None:
    layout = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    plain, overlapped = (run("dense", tp_comm_overlap=on, **layout).trace for on in (False, True))
    transient = [
        _transients(trace, "decoder.layers.1.mlp.linear_fc1") for trace in (plain, overlapped)
    ]
    assert transient[0] - transient[1] == 4 * HIDDEN_BYTES  # each of four micro-batches once


def _transients(trace, module: str) -> int:
    """Bytes of blocks of the module in the last step that were of no use to backward."""
    start = trace.marker("step 2 start")
    code, forward = trace.module_names.index(module), trace.phase_names.index("forward")
    transient = trace.category_names.index("forward transients")
    made = (trace.bytes[start:] > 0) & (trace.module[start:] == code)
    made &= (trace.phase[start:] == forward) & (trace.category[start:] == transient)
    return int(trace.bytes[start:][made].sum())


def test_overlapped_products_have_a_workspace_for_each_stream() -> None:
    layout = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    plain, overlapped = (run("dense", tp_comm_overlap=on, **layout) for on in (False, True))
    workspace = 32 * 1024 * 1024 + 1024
    assert overlapped.static_bytes - plain.static_bytes == 2 * workspace


def test_megatron_cores_own_layers_keep_all_scores() -> None:
    heads = 4
    more = kept(run("plain", transformer_impl="local")) - kept(run("plain"))
    assert more > 0.9 * LAYERS * heads * LENGTH * LENGTH * 2


def test_half_precision_keeps_as_much_as_bfloat16() -> None:
    found = run("plain", precision="fp16")
    assert found.peak_allocated_bytes == pytest.approx(run("plain").peak_allocated_bytes, rel=1e-3)
    assert found.breakdown["optimizer state"] == pytest.approx(
        run("plain").breakdown["optimizer state"], rel=1e-3
    )


def test_sinkhorn_routing_ends() -> None:
    found = run(
        "moe", moe_router_load_balancing_type="sinkhorn", moe_aux_loss_coeff=0.0, moe_router_topk=1
    )
    assert kept(found) > LAYERS * 2 * WIDTH * LENGTH
