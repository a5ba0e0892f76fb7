"""The device under a rank of Megatron Bridge, as the step recorder sees it."""

from __future__ import annotations

from trainables.device_memory import PeakSampler, device_used_bytes


class CudaMeter:
    """A GPU: its allocator's peaks, and what NVML saw of the whole device."""

    def __init__(self) -> None:
        self.notes: dict[str, str] = {}
        self._sampler: PeakSampler | None = None

    def synchronize(self) -> None:
        import torch

        torch.cuda.synchronize()

    def start(self) -> None:
        """Count peaks from here, where model and optimizer exist."""
        import gc

        import torch

        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        device = torch.cuda.current_device()
        self.notes["device"] = torch.cuda.get_device_name(device)
        self._sampler = PeakSampler(lambda: device_used_bytes(device), "device")
        self._sampler.__enter__()

    def peaks_bytes(self) -> tuple[int, int | None, int | None]:
        import torch

        device = None
        if self._sampler is not None:
            self._sampler.sample()
            self._sampler.__exit__()
            device = self._sampler.peak_bytes or None
        return torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved(), device


class CpuMeter:
    """A rank without a GPU: the largest resident size of this process."""

    def __init__(self) -> None:
        self.notes = {"device": "cpu", "memory": "resident bytes of the process"}

    def synchronize(self) -> None:
        """Work on the CPU is done when the call returns."""

    def start(self) -> None:
        """The kernel keeps the peak of the whole process; it cannot be reset."""

    def peaks_bytes(self) -> tuple[int, int | None, int | None]:
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, None, None
