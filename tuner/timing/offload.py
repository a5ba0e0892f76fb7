"""What offload to the host adds to a step.

Activations go to the host beside the forward pass and come back beside the backward pass; what does
not fit beside them is waited for. Parameters whose optimizer state is on the host are updated
there: gradients come down, Adam runs on the host's cores, weights go back
(megatron/core/optimizer/cpu_offloading/hybrid_optimizer.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tuner.candidate import Candidate
from tuner.errors import InputError
from tuner.models import ModelSpec
from tuner.timing.units import installed_fields, layer_kinds

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import ArrayLike, NDArray

    from tuner.hardware import Gpu
    from tuner.memory.composition import ProfileSource
    from tuner.timing.rates import Rates

    Seconds = NDArray[np.float64]

HIDDEN = 0.9
"""Of a pass that transfers can run beside. Llama-3 70B with half of its layers offloaded on GB200
moves for 0.8 of its forward passes, and is published at the time of the passes alone (Megatron
Bridge's performance pages)."""

_OPTIMIZER_BYTES = 4 + 4
"""Of a parameter updated on the host: its float32 gradient comes, its float32 weight goes."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """Activations that move: `bytes` of a micro-batch by unit, on average over its layers."""

    bytes: tuple[tuple[str, float], ...] = ()

    def of(self, unit: str) -> float:
        """Bytes that a layer of this kind moves each way, on average."""
        return dict(self.bytes).get(unit, 0.0)


NOTHING = Traffic()


def activation_traffic(
    model: ModelSpec, candidate: Candidate, *, seq_length: int, precision: str, architecture: str
) -> Traffic:
    """The activations that a candidate offloads, from profiles of its layers.

    Offload by layers moves all that the offloaded ones keep, and has the passes of the others for
    it too: Transformer Engine spreads the transfers over all layers (pytorch/cpu_offload.py and
    cpu_offload_v1.py). Offload by modules moves what a profile with it keeps less than one
    without. Makes up to two dry runs unless the cache has them. Raises what dry runs raise.
    """
    from tuner.memory.composition import ProfileSource

    if not (candidate.cpu_offloading or candidate.fine_grained_activation_offloading):
        return NOTHING
    source = ProfileSource(seq_length, precision, architecture)
    plain = _kept(model, _without_offload(candidate), source)
    if candidate.cpu_offloading:
        share = min(1.0, candidate.cpu_offloading_num_layers / model.num_layers)
        return Traffic(tuple((unit, share * kept) for unit, kept in sorted(plain.items())))
    lean = _kept(model, _profiled(candidate), source)
    moved = {unit: max(0.0, kept - lean.get(unit, kept)) for unit, kept in plain.items()}
    return Traffic(tuple(sorted(moved.items())))


def _kept(model: ModelSpec, candidate: Candidate, source: ProfileSource) -> Mapping[str, float]:
    """Bytes that a layer of each kind keeps for one micro-batch.

    Kinds are those of kernels; of these, profiles of memory tell some apart.
    """
    from tuner.memory.composition.kinds import layer_kinds as memory_kinds
    from tuner.memory.composition.measure import profile_task, profiles_of

    (profile,) = profiles_of([profile_task(model, candidate, source)])
    if isinstance(profile, InputError):
        raise profile
    kept: dict[str, list[int]] = {}
    for kind, finer in zip(
        layer_kinds(model), memory_kinds(model, candidate.to_flat()), strict=True
    ):
        kept.setdefault(kind, []).append(profile.units[finer].forward_change)
    return {kind: sum(layers) / len(layers) for kind, layers in kept.items()}


_NOT_PROFILED = ("overlap_moe_expert_parallel_comm", "delay_wgrad_compute", "use_megatron_fsdp",
                 "use_torch_fsdp2", "data_parallel_sharding_strategy")  # fmt: skip
"""Settings that profiles do not take and that leave alone what a layer keeps."""


def _profiled(candidate: Candidate) -> Candidate:
    taken = installed_fields().difference(_NOT_PROFILED)
    extra = tuple(pair for pair in candidate.extra if pair[0] in taken)
    return replace(candidate, cuda_graph_impl="none", cuda_graph_modules=(), extra=extra)


def _without_offload(candidate: Candidate) -> Candidate:
    return replace(
        _profiled(candidate),
        cpu_offloading=False,
        cpu_offloading_num_layers=0,
        fine_grained_activation_offloading=False,
        offload_modules=(),
    )


def host_bytes_per_s(gpu: Gpu, rates: Rates) -> float:
    """What a GPU moves to or from its host in one direction."""
    return gpu.host_bandwidth_bytes_per_s * rates.host_link


def transfer_wait(moved_bytes: ArrayLike, pass_s: ArrayLike, gpu: Gpu, rates: Rates) -> Seconds:
    """What a pass of `pass_s` takes longer for a transfer beside it.

    Copy engines move the bytes: what hides takes its share of the memory's bandwidth alone.
    """
    import numpy as np

    moved = np.asarray(moved_bytes, dtype=float) / host_bytes_per_s(gpu, rates)
    exposed = np.maximum(0.0, moved - HIDDEN * np.asarray(pass_s, dtype=float))
    beside = host_bytes_per_s(gpu, rates) / gpu.memory_bandwidth_bytes_per_s
    waited: Seconds = exposed + beside * (moved - exposed)
    return waited


def host_update_s(gpu: Gpu, rates: Rates, *, overlapped: bool = False) -> float:
    """Seconds of the host's optimizer for one parameter; its transfers run beside it if
    `overlapped` (`overlap_cpu_optimizer_d2h_h2d`)."""
    moved = _OPTIMIZER_BYTES / host_bytes_per_s(gpu, rates)
    return max(rates.host_update_s, moved) if overlapped else rates.host_update_s + moved
