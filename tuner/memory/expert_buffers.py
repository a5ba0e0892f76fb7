"""Device memory that the token dispatchers of deep_ep hold outside PyTorch's allocator.

DeepEP: `Config::get_nvl_buffer_size_hint` and `get_rdma_buffer_size_hint` (csrc/config.hpp, 1.2.1)
for the larger of its dispatch and combine configurations (deep_ep/buffer.py). HybridEP:
`NVLCoordinator::allocate_combine_buffers` (csrc/hybrid_ep/buffer/intranode.cu), whose buffers serve
dispatch too.
"""

from __future__ import annotations

_CHANNELS = 10
_PEERS = 8
"""Ranks of one NVLink domain that DeepEP knows (NUM_MAX_NVL_PEERS)."""

_TOPK, _SCALES, _SOURCE_BYTES = 128, 128, 8
"""Choices and scales a token may have, and bytes that say where it came from."""

_RECEIVED = {
    # ranks: tokens in flight over NVLink and over the network, the latter whole chunks
    2: (256, 0),
    4: (256, 0),
    8: (256, 0),
    16: (288, 140),
    24: (288, 128),
    32: (288, 128),
    64: (288, 140),
    128: (560, 132),
    144: (720, 132),
    160: (720, 132),
}
"""The larger of Buffer.get_dispatch_config and get_combine_config (deep_ep/buffer.py)."""


def deepep_bytes(ranks: int, hidden_size: int) -> int:
    """Bytes of DeepEP's buffers for `ranks` and tokens of `hidden_size` 16-bit numbers."""
    nvlink, network = _RECEIVED[min(_RECEIVED, key=lambda size: abs(size - ranks))]
    each_token = 2 * hidden_size + _SOURCE_BYTES + _TOPK * (8 + 4) + _SCALES * 4
    domain, domains = min(ranks, _PEERS), max(1, ranks // _PEERS)
    total = _CHANNELS * domain * (nvlink * each_token + 4 * (2 * domains + 3))
    if ranks > _PEERS:
        total += 2 * _CHANNELS * domains * (network * (each_token + 16) + 4 * (2 * _PEERS + 2))
    return total


def hybridep_bytes(ranks: int, tokens: int, hidden_size: int, experts: int) -> int:
    """Bytes of HybridEP's buffers: room for every token of `ranks` with `tokens` each.

    `experts` are all of one group of ranks that reach each other's memory.
    """
    return ranks * tokens * (2 * hidden_size + 4 * experts + 4 * (hidden_size // 128))
