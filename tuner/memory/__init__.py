"""Memory of one rank: dry run of real Megatron-Core, layer profiles, allocator.

`dry_run` runs one rank of a candidate without data and gives every allocation with its cause;
`estimate_memory` does so for the ranks that may hold the peak. Nothing here imports PyTorch: the
steps run in worker processes.
"""

from tuner.memory.dryrun import DryRun, MemoryEstimate, dry_run, estimate_memory
from tuner.memory.errors import UnsupportedError
from tuner.memory.trace import Trace

__all__ = ["DryRun", "MemoryEstimate", "Trace", "UnsupportedError", "dry_run", "estimate_memory"]
