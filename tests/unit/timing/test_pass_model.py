"""Seconds of kernels, collectives and passes: the directions physics demands."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tuner.candidate import Candidate
from tuner.hardware import get_gpu
from tuner.memory.kernel_log import FORMAT, GROUP, KIND, OPERATION, KernelLog
from tuner.timing import collectives
from tuner.timing.calibration import starting_rates
from tuner.timing.kernels import device_seconds
from tuner.timing.passes import PARTS, Machine, Surroundings, pass_seconds
from tuner.timing.topology import Links, Span, group_span
from tuner.timing.units import SCOPES, UnitKernels

RATES = starting_rates()
H100 = get_gpu("h100")


def row(kind: str, dtype: str = "", m=0, n=0, k=0, batch=1, flops=0.0, moved=0.0, **more):
    """One row of a log."""
    columns = {"op": 0, "group": 0, "group_size": 1, "asynchronous": False} | more
    return (0, 0, 0, KIND[kind], FORMAT[dtype], m, n, k, batch, flops, moved, *columns.values())


def product(m, n, k, dtype="bf16", batch=1, kind="gemm"):
    return row(kind, dtype, m, n, k, batch, 2.0 * m * n * k * batch, 2.0 * (m * k + k * n + m * n))


def gathered(size, *, beside=False, group="tp", ranks=8):
    return row(
        "collective",
        moved=size,
        op=OPERATION["all_gather"],
        group=GROUP[group],
        group_size=ranks,
        asynchronous=beside,
    )


def seconds(*rows, gpu=H100, rates=RATES):
    return device_seconds(KernelLog.from_rows(rows), gpu, rates)


def unit(*rows, scope="attn"):
    log = KernelLog.from_rows(rows)
    codes = np.full(len(log), SCOPES.index(scope))
    return UnitKernels(log, log, codes, np.zeros(len(log), bool), 0, 0)


def spent(one, candidate=None, rates=RATES, forward=True, world_size=8, **links):
    candidate = candidate or Candidate.from_flat({"tensor_model_parallel_size": 8})
    around = Surroundings.of(candidate, 8)
    machine = Machine(H100, Links.of(H100, **links), rates, world_size)
    parts = pass_seconds(one, forward, candidate, around, machine)
    return dict(zip(PARTS, parts.tolist(), strict=True))


def test_no_product_is_faster_than_the_peak_allows():
    sizes = [(64, 64, 64), (4096, 4096, 4096), (8192, 28672, 8192), (4097, 4097, 512)]
    times = seconds(*(product(*size) for size in sizes))
    bound = [2.0 * m * n * k / H100.peak_flops["bf16"] / RATES.half_gemm for m, n, k in sizes]
    assert (times >= np.array(bound) * (1 - 1e-9)).all()
    assert times[2] < 1.1 * bound[2]  # a large product comes near what is sustained


def test_a_wave_begun_costs_more_than_its_share():
    even = 128 * 11  # 11 x 12 tiles of 128 x 256 are one wave of 132 multiprocessors
    full, begun = seconds(product(even, 256 * 12, 8192), product(even + 128, 256 * 12, 8192))
    assert begun / full > (even + 128) / even


def test_eight_bits_are_faster_than_sixteen_and_small_experts_slower_than_one_product():
    wide, narrow = seconds(product(8192, 8192, 8192), product(8192, 8192, 8192, "fp8_current"))
    assert narrow < wide
    one, many = seconds(
        product(8192, 2048, 2048), product(64, 2048, 2048, batch=128, kind="grouped_gemm")
    )
    assert many > one


def test_attention_pays_for_the_blocks_on_the_edge_of_its_mask():
    def attention(length, pairs):
        flops = 4.0 * 128 * pairs * 32
        return row("attention_forward", "bf16", length, length, 128, 32, flops, 0.0), flops

    (long, work), (short, little) = attention(8192, 8192**2 / 2), attention(512, 512**2 / 2)
    times = seconds(long, short)
    assert times[1] / little > times[0] / work


def test_memory_bound_kernels_take_their_bytes_over_the_bandwidth():
    (time,) = seconds(row("memory", moved=1e9))
    assert time == pytest.approx(1e9 / H100.memory_bandwidth_bytes_per_s / RATES.memory)


def test_groups_span_the_domains_their_stride_reaches():
    candidate = Candidate.from_flat(
        {"tensor_model_parallel_size": 4, "context_parallel_size": 4, "num_moe_experts": 8}
    )
    links = Links.of(H100)
    assert group_span("tp", 4, candidate, links, 64) == Span(4, 4)
    assert group_span("cp", 4, candidate, links, 64) == Span(4, 2)
    assert group_span("dp", 4, candidate, links, 64) == Span(4, 1)
    rack = Links.of(get_gpu("gb200"))
    assert group_span("cp", 4, candidate, rack, 64) == Span(4, 4)


@pytest.mark.parametrize("operation", ["all_gather", "reduce_scatter", "all_to_all"])
def test_crossing_nodes_is_slower_and_rails_make_up_for_it(operation):
    links = Links.of(H100)

    def time(span):
        return float(collectives.seconds(operation, 1e9, span, links, RATES))

    inside, rails, alone = time(Span(8, 8)), time(Span(16, 8)), time(Span(16, 1))
    assert inside < rails < alone
    if operation != "all_to_all":
        assert alone > 5 * rails


def test_collectives_beside_a_product_cost_only_what_is_left():
    work = product(8192, 8192, 8192)
    waiting = spent(unit(gathered(1e8), work))
    beside = spent(unit(gathered(1e8, beside=True), work))
    assert 0 < beside["tensor"] < 0.3 * waiting["tensor"]
    small = spent(unit(gathered(1e8, beside=True), product(64, 64, 64)))
    assert small["tensor"] > 0.9 * waiting["tensor"]


def test_userbuffers_hide_exchanges_of_tensor_parallelism():
    flat = {"tensor_model_parallel_size": 8}
    work = unit(gathered(1e8), product(8192, 8192, 8192))
    plain = spent(work, Candidate.from_flat(flat))
    hidden = spent(work, Candidate.from_flat(flat | {"tp_comm_overlap": True}))
    assert hidden["tensor"] < plain["tensor"]
    assert hidden["compute"] == plain["compute"]


def test_graphs_pay_where_the_host_is_the_slower_one_and_only_there():
    small, large = [product(64, 64, 64)] * 50, [product(8192, 8192, 8192)] * 50
    flat = {"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": ["attn"]}
    graphed = Candidate.from_flat(flat)
    before, after = spent(unit(*small)), spent(unit(*small), graphed)
    assert sum(after.values()) < 0.2 * sum(before.values())
    assert before["host"] > 0
    assert after["host"] < 1e-3 * sum(after.values())
    before, after = spent(unit(*large)), spent(unit(*large), graphed)
    assert sum(after.values()) == pytest.approx(sum(before.values()), rel=0.01)
    elsewhere = spent(unit(*small, scope="mlp"), graphed)
    assert sum(elsewhere.values()) == pytest.approx(sum(spent(unit(*small)).values()))


def test_a_graph_of_few_kernels_can_cost_more_than_it_saves():
    few = [product(64, 64, 64)]
    rates = replace(RATES, graph_launch_s=2e-4)
    flat = {"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": ["attn"]}
    plain = spent(unit(*few), rates=rates)
    graphed = spent(unit(*few), Candidate.from_flat(flat), rates=rates)
    assert sum(graphed.values()) > sum(plain.values())


def test_recompute_is_counted_apart_with_its_collectives():
    log = KernelLog.from_rows([gathered(1e8), product(4096, 4096, 4096)] * 2)
    repeated = np.array([True, True, False, False])
    one = UnitKernels(log, log, np.zeros(4, int), repeated, 0, 0)
    parts = spent(one, forward=False)
    assert parts["recompute"] == pytest.approx(parts["compute"] + parts["tensor"])


def test_flexible_dispatchers_send_a_token_once_to_each_rank():
    exchange = row(
        "collective",
        moved=1e9,
        op=OPERATION["all_to_all"],
        group=GROUP["ep"],
        group_size=8,
        asynchronous=False,
    )
    flat = {"expert_model_parallel_size": 8, "moe_token_dispatcher_type": "flex"}
    copies = spent(unit(exchange), Candidate.from_flat({"expert_model_parallel_size": 8}))
    once = spent(unit(exchange), Candidate.from_flat(flat))
    assert 0.5 < once["expert"] / copies["expert"] < 0.8  # 5.25 of 8 ranks for 8 of 64 experts


def test_combined_passes_cost_the_host_time_for_each_of_their_nodes():
    small = unit(*[product(64, 64, 64)] * 5)
    plain = spent(small)
    combined = spent(small, Candidate.from_flat({"overlap_moe_expert_parallel_comm": True}))
    whole = Candidate.from_flat(
        {"overlap_moe_expert_parallel_comm": True, "cuda_graph_impl": "full_iteration"}
    )
    assert combined["host"] - plain["host"] == pytest.approx(2 * RATES.host_node_s, rel=0.1)
    assert spent(small, whole)["host"] == 0.0


def test_routing_by_data_makes_the_busiest_experts_decide():
    experts = unit(product(4096, 4096, 4096, batch=8, kind="grouped_gemm"))
    by_data = spent(experts)
    forced = spent(experts, Candidate.from_flat({"moe_router_force_load_balancing": True}))
    assert by_data["compute"] == pytest.approx(RATES.routing * forced["compute"], rel=0.01)
