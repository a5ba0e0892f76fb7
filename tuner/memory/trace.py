"""The allocations and frees of one rank, in the order they happened."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tuner.memory.kernel_log import KernelLog

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MODEL_BUILT = "model built"
"""Marker after the weights, gradient buffers and optimizer exist, before the first step."""


EMPTY_CACHE = "empty cache"
"""Marker where unused segments were given back to the driver (`torch.cuda.empty_cache`)."""


def step_start(step: int) -> str:
    """Name of the marker before step `step`, counted from 1."""
    return f"step {step} start"


def step_end(step: int) -> str:
    """Name of the marker after the optimizer finished step `step`, counted from 1."""
    return f"step {step} end"


def _no_markers() -> NDArray[np.int64]:
    import numpy as np

    return np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Trace:
    """Every allocation and free of one rank; one entry of each array per event, in time order.

    `block` (int64) numbers the allocation: its first event allocates, its second, where there is
    one, frees. `bytes` (int64) is what was asked of the allocator, positive on allocation and the
    same negative on free; no rounding is applied. `module`, `phase` and `category` (int32) index
    the name tables: which module made the block, in which phase the *event* happened, and what the
    block holds. `markers` are (event index, name): the marker lies before the event of that index.
    `pool` (int32) is the number of the private pool of CUDA graphs that the block is from, 0 for
    the ordinary pool; None where no graph was captured.
    """

    block: NDArray[np.int64]
    bytes: NDArray[np.int64]
    module: NDArray[np.int32]
    phase: NDArray[np.int32]
    category: NDArray[np.int32]
    module_names: tuple[str, ...]
    phase_names: tuple[str, ...]
    category_names: tuple[str, ...]
    markers: tuple[tuple[int, str], ...]
    kernels: KernelLog = field(default_factory=KernelLog.empty)
    kernel_markers: NDArray[np.int64] = field(default_factory=_no_markers)
    pool: NDArray[np.int32] | None = None

    def __len__(self) -> int:
        return len(self.block)

    def marker(self, name: str) -> int:
        """Event index of the first marker called `name`; raises KeyError where there is none."""
        for index, marker in self.markers:
            if marker == name:
                return index
        raise KeyError(name)

    def kernels_between(self, start: str, end: str) -> KernelLog:
        """The operations between the first markers of these names; KeyError without them."""
        names = [name for _, name in self.markers]
        for name in (start, end):
            if name not in names:
                raise KeyError(name)
        first, last = (int(self.kernel_markers[names.index(name)]) for name in (start, end))
        return self.kernels.select(slice(first, last))

    def live_bytes(self, granularity: int = 1) -> NDArray[np.int64]:
        """Bytes alive after each event, every block rounded up to `granularity`."""
        import numpy as np

        sizes = np.abs(self.bytes)
        rounded = -(-sizes // granularity) * granularity
        return np.cumsum(np.sign(self.bytes) * rounded)

    def resident_bytes(self, granularity: int = 1) -> NDArray[np.int64]:
        """Bytes in use after each event: `live_bytes`, and what private pools hold besides.

        The memory of a private pool is its graphs' as long as they may be replayed, so that a pool
        counts as much as it ever had alive at once.
        """
        import numpy as np

        live = self.live_bytes(granularity)
        if self.pool is None:
            return live
        sizes = np.sign(self.bytes) * (-(-np.abs(self.bytes) // granularity) * granularity)
        for pool in np.unique(self.pool[self.pool > 0]):
            inside = np.cumsum(np.where(self.pool == pool, sizes, 0))
            live = live - inside + np.maximum.accumulate(inside)
        return live

    def alive_at(self, event: int) -> NDArray[np.int64]:
        """Indices of the allocation events whose blocks are alive after event `event`."""
        import numpy as np

        blocks = self.block[: event + 1]
        allocates = self.bytes[: event + 1] > 0
        freed = np.unique(blocks[~allocates])
        return np.flatnonzero(allocates & ~np.isin(blocks, freed))

    def save(self, path: Path) -> None:
        """Write to one compressed `.npz` file; `load` reads it back."""
        import numpy as np

        np.savez_compressed(
            path,
            allow_pickle=False,
            **{name: getattr(self, name) for name in _ARRAYS},
            **{name: np.array(getattr(self, name), dtype=np.str_) for name in _NAME_TABLES},
            marker_events=np.array([index for index, _ in self.markers], dtype=np.int64),
            marker_names=np.array([name for _, name in self.markers], dtype=np.str_),
            kernel_markers=self.kernel_markers,
            **({} if self.pool is None else {"pool": self.pool}),
            **self.kernels.to_arrays(_KERNEL_PREFIX),
        )

    @classmethod
    def load(cls, path: Path) -> Trace:
        import numpy as np

        with np.load(path, allow_pickle=False) as data:
            values: dict[str, Any] = {name: data[name] for name in _ARRAYS}
            for name in _NAME_TABLES:
                values[name] = tuple(str(item) for item in data[name])
            markers = tuple(
                (int(event), str(name))
                for event, name in zip(data["marker_events"], data["marker_names"], strict=True)
            )
            values["pool"] = data.get("pool")
            values["kernel_markers"] = data["kernel_markers"]
            values["kernels"] = KernelLog.from_arrays(data, _KERNEL_PREFIX)
        return cls(**values, markers=markers)


_ARRAYS = ("block", "bytes", "module", "phase", "category")
_NAME_TABLES = ("module_names", "phase_names", "category_names")
_KERNEL_PREFIX = "kernels."
