"""Dry runs of Aleph Alpha's `scaling`, the framework behind the layout sweeps of 2311.05610.

It is no Megatron-Core, so the sweeps' rows cannot be dry-run with that. This package does what its
training step does to memory, read from github.com/Aleph-Alpha/scaling: eager PyTorch layers, tensor
and pipeline parallelism, ZeRO-1. Recorder, allocator and fixed costs are those of all dry runs.
"""

from tuner.validation.scaling.settings import ScalingRun

__all__ = ["ScalingRun"]
