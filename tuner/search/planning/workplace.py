"""What a space is estimated for: model, machine and batch."""

from __future__ import annotations

from dataclasses import dataclass

from tuner.hardware import Gpu
from tuner.models import ModelSpec
from tuner.timing.passes import Machine
from tuner.timing.rates import Rates
from tuner.timing.topology import Links


def rates_of(gpu: Gpu, precision: str) -> Rates:
    """What is known of a GPU's rates at a precision before a study measures it."""
    from tuner.timing.calibration import starting_rates

    return starting_rates()


@dataclass(frozen=True, slots=True)
class Workplace:
    """A model on a number of GPUs; `rates` are what the GPUs and links sustain."""

    model: ModelSpec
    gpu: Gpu
    gpus_per_node: int
    world_size: int
    seq_length: int
    global_batch_size: int
    precision: str
    rates: Rates

    @property
    def machine(self) -> Machine:
        """The machine as the time model takes it."""
        links = Links.of(self.gpu, gpus_per_node=self.gpus_per_node)
        return Machine(self.gpu, links, self.rates, self.world_size)

    @property
    def host_bytes_per_s(self) -> float:
        """What a GPU moves to or from its host in one direction."""
        return self.gpu.host_bandwidth_bytes_per_s * self.rates.host_link
