"""What a space is estimated for: model, machine and batch."""

from __future__ import annotations

from dataclasses import dataclass

from tuner.candidate import Candidate
from tuner.hardware import Gpu
from tuner.memory.composition import ProfileSource
from tuner.memory.fixed_costs import fixed_costs
from tuner.memory.request import LOCAL, TRANSFORMER_ENGINE
from tuner.models import ModelSpec
from tuner.timing.passes import Machine
from tuner.timing.rates import Rates
from tuner.timing.topology import Links


@dataclass(frozen=True, slots=True)
class Workplace:
    """A model on a number of GPUs; `rates` are what the GPUs and links sustain.

    With `cores`, ranks are processes that share the cores of one machine, described by `gpu`.
    `limit_bytes` is what a rank may allocate where that is not what the GPU has. `frontend` is what
    sets Megatron-Core up: "mcore", "bridge" or "megatron-lm".
    """

    model: ModelSpec
    gpu: Gpu
    gpus_per_node: int
    world_size: int
    seq_length: int
    global_batch_size: int
    precision: str
    rates: Rates
    cores: int | None = None
    limit_bytes: float | None = None
    frontend: str = "mcore"

    @property
    def layers(self) -> str:
        """Whose layers run: those of Transformer Engine on GPUs, local ones on a CPU."""
        return TRANSFORMER_ENGINE if self.cores is None else LOCAL

    @property
    def profile_source(self) -> ProfileSource:
        """How profiles of its settings are made."""
        return ProfileSource(
            self.seq_length,
            self.precision,
            self.gpu.architecture,
            layers=self.layers,
            frontend=self.frontend,
        )

    def allocatable_bytes(self, candidate: Candidate) -> float:
        """Bytes that PyTorch may allocate on a rank of the candidate."""
        if self.limit_bytes is not None:
            return self.limit_bytes
        if self.cores is not None:
            return self.gpu.usable_memory_bytes / self.world_size
        moe = self.model.num_moe_experts is not None
        taken = fixed_costs(candidate, gpu=self.gpu, world_size=self.world_size, moe=moe)
        return float(self.gpu.usable_memory_bytes - taken.total_bytes)

    @property
    def machine(self) -> Machine:
        """The machine as the time model takes it."""
        links = Links.of(self.gpu, gpus_per_node=self.gpus_per_node)
        return Machine(self.gpu, links, self.rates, self.world_size, self.cores)
