"""What a machine sustains: few physical parameters, as data with their spread.

Rates are those with the newest software (`tuner.timing.software`). Peaks are those of
`tuner.hardware`; these are the shares of them that training kernels reach, and
the fixed times around kernels, collectives and steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any


def _rate(doc: str, spread: float) -> Any:
    from dataclasses import field

    return field(metadata={"doc": doc, "spread": spread})


@dataclass(frozen=True, slots=True)
class Rates:
    """Parameters of one GPU and precision. Shares are of peaks; times are in seconds.

    The metadata of each field holds what it means and how far it is believed to lie from its
    starting value before any measurement: one standard deviation of its logarithm.
    """

    gemm: float = _rate("share of the peak that large matrix products reach", 0.15)
    half_gemm: float = _rate("share of the 16-bit peak that 16-bit products reach", 0.1)
    grouped_gemm: float = _rate(
        "speed of experts' products against single ones of their shape", 0.3
    )
    batched_gemm: float = _rate(
        "share of the peak in batches of small products: scans, unfused attention", 0.4
    )
    attention_forward: float = _rate("share of the 16-bit peak in fused attention, forward", 0.15)
    attention_backward: float = _rate("share of the 16-bit peak in fused attention, backward", 0.15)
    memory: float = _rate("share of the memory bandwidth in pointwise kernels", 0.1)
    quantize: float = _rate("share of the memory bandwidth in kernels that quantise", 0.3)
    permute: float = _rate("share of the memory bandwidth in kernels that move rows", 0.3)
    kernel_gap_s: float = _rate("device time around each kernel launched by the host", 0.3)
    graph_gap_s: float = _rate("device time around each kernel of a CUDA graph", 0.3)
    host_kernel_s: float = _rate("host time to launch one kernel", 0.5)
    host_expert_s: float = _rate("host time of one expert in a grouped product", 0.7)
    host_node_s: float = _rate("host time of one node of a combined pass of two micro-batches", 0.6)
    graph_launch_s: float = _rate("host time to launch one CUDA graph", 0.5)
    link: float = _rate("share of the NVLink bandwidth in collectives", 0.15)
    network: float = _rate("share of the network bandwidth in collectives", 0.2)
    link_latency_s: float = _rate("fixed time of a collective inside an NVLink domain", 0.3)
    network_latency_s: float = _rate(
        "fixed time for each doubling of domains a collective spans", 0.5
    )
    userbuffers_hidden: float = _rate(
        "share of TP communication hidden under products it overlaps", 0.1
    )
    expert_hidden: float = _rate(
        "share of EP communication hidden by overlapped micro-batches", 0.2
    )
    data_hidden: float = _rate("share of overlapped DP communication that fits under compute", 0.2)
    contention: float = _rate("compute slowed by communication beside it, share of its time", 0.5)
    host_link: float = _rate("share of the bandwidth to host memory in offload", 0.2)
    host_update_s: float = _rate("time of a rank's host to update one parameter", 0.7)
    step_s: float = _rate("fixed time of a step outside the schedule", 0.5)
    imbalance: float = _rate("time of the slowest rank of a step against the mean", 0.005)
    routing: float = _rate("work of the busiest expert rank against the mean, routed by data", 0.08)
    older_software: float = _rate("time of a step against that by software a year newer", 0.1)

    def with_values(self, values: Mapping[str, float]) -> Rates:
        """These rates with some of them replaced."""
        return replace(self, **values)

    def to_json(self) -> dict[str, float]:
        return {f.name: getattr(self, f.name) for f in fields(self)}


HIGHEST = {
    "gemm": 0.85,
    "half_gemm": 0.82,
    "batched_gemm": 0.82,
    "attention_forward": 0.82,
    "attention_backward": 0.75,
    "memory": 0.94,
    "quantize": 0.94,
    "permute": 0.94,
    "link": 0.95,
    "network": 0.97,
    "userbuffers_hidden": 1.0,
    "expert_hidden": 1.0,
    "data_hidden": 1.0,
    "host_link": 0.97,
}
"""The most that shares may be fitted to: what the best kernels are known to reach.

Products: cuBLAS and CUTLASS on H100 in BF16 some 800 of 989 TFLOP/s, DeepGEMM's README (H800, FP8)
1,550 of 1,979. Attention: FlashAttention-3 (Shah et al. 2024, arXiv:2407.08608) 740 of 989 forward.
Memory: STREAM copies reach 92 to 94 % of the nominal bandwidth of HBM.
"""


def documentation() -> dict[str, str]:
    """What each parameter means."""
    return {f.name: str(f.metadata["doc"]) for f in fields(Rates)}


def spreads() -> dict[str, float]:
    """One standard deviation of the logarithm of each parameter before measurements."""
    return {f.name: float(f.metadata["spread"]) for f in fields(Rates)}
