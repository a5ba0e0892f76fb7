"""Peaks of memory that no allocator counts: whole devices, and processes on the CPU."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

_INTERVAL_S = 0.2


class PeakSampler:
    """The largest figure that `used_bytes` gave while this context was open.

    It is asked every fifth of a second, so that a peak shorter than that may be missed; `what`
    says what the figure is. Answers that raise OSError or RuntimeError (a device or process that
    has gone) are left out.
    """

    def __init__(self, used_bytes: Callable[[], int], what: str) -> None:
        self.peak_bytes = 0
        self.what = what
        self._used_bytes = used_bytes
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)

    def __enter__(self) -> PeakSampler:
        self.sample()
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._ended.set()
        self._thread.join()

    def sample(self) -> None:
        """Ask once, now."""
        with contextlib.suppress(OSError, RuntimeError):
            self.peak_bytes = max(self.peak_bytes, self._used_bytes())

    def _follow(self) -> None:
        while not self._ended.wait(_INTERVAL_S):
            self.sample()


def family_peak_rss_bytes(pid: int) -> int:
    """Resident bytes of the largest of a process and its descendants; 0 where it has gone."""
    import psutil

    try:
        parent = psutil.Process(pid)
        family = [parent, *parent.children(recursive=True)]
    except psutil.Error:
        return 0
    largest = 0
    for process in family:
        try:
            largest = max(largest, int(process.memory_info().rss))
        except psutil.Error:
            continue
    return largest


def device_used_bytes(index: int) -> int:
    """Bytes in use on a CUDA device of this process, by NVML where its Python module is installed.

    Without it the CUDA runtime is asked (`cudaMemGetInfo`): the same figure, but asking makes a
    context on the device.
    """
    import torch

    library = _nvml()
    if library is None:
        free, total = torch.cuda.mem_get_info(index)
        return int(total - free)
    return _used(library, f"GPU-{torch.cuda.get_device_properties(index).uuid}")


def devices_used_bytes() -> int:
    """Bytes in use on the fullest device this process may see, without touching any.

    Raises RuntimeError where NVML's Python module is missing or sees no device.
    """
    import os

    library = _nvml()
    if library is None:
        raise RuntimeError("nvidia-ml-py is not installed")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = range(library.nvmlDeviceGetCount()) if visible is None else visible.split(",")
    return max((_used(library, name) for name in names if str(name).strip()), default=0)


def _used(library: Any, name: int | str) -> int:
    text = str(name).strip()
    try:
        handle = (
            library.nvmlDeviceGetHandleByIndex(int(text))
            if text.isdigit()
            else library.nvmlDeviceGetHandleByUUID(text)
        )
        return int(library.nvmlDeviceGetMemoryInfo(handle).used)
    except library.NVMLError as error:
        raise RuntimeError(f"NVML says nothing of device {text}: {error}") from None


def _nvml() -> Any:
    """NVML's Python module, initialised; None where it is not installed or finds no driver."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml
