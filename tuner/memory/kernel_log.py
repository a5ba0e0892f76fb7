"""The device operations of one rank, in the order they were issued.

One row for each operation that a GPU would run: products, attention, memory-bound kernels,
collectives, and copies over the link to the host. Times are the business of `tuner.timing`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

KINDS = (
    "memory",  # bandwidth-bound: pointwise, norms, copies, reductions
    "gemm",
    "grouped_gemm",  # `batch` products that share their shape, one for each local expert
    "attention_forward",
    "attention_backward",
    "quantize",  # makes low-precision copies; bandwidth-bound
    "permute",  # gathers or scatters rows; bandwidth-bound
    "optimizer",  # updates parameters and their state; bandwidth-bound
    "collective",
    "host_copy",  # over PCIe or NVLink-C2C
    "host_memory",  # pointwise work of the CPU on tensors in its memory
    "synchronize",  # the host waits for the device
)
ARITHMETIC = (
    "",
    "fp32",
    "bf16",
    "fp16",
    "fp8_delayed",
    "fp8_current",
    "fp8_block",
    "mxfp8",
    "nvfp4",
    "fp64",
    "integer",
)
"""Formats of arithmetic; quantised ones by recipe, since it decides what surrounds a product."""

OPERATIONS = (
    "",
    "all_gather",
    "reduce_scatter",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "send",
    "recv",
)

_GROUP_NAMES = {
    # `group_desc` in megatron/core/parallel_state.py `initialize_model_parallel`: short name
    "TENSOR_MODEL_PARALLEL_GROUP": "tp",
    "CONTEXT_PARALLEL_GROUP": "cp",
    "TENSOR_AND_CONTEXT_PARALLEL_GROUP": "tp-cp",
    "MODEL_PARALLEL_GROUP": "mp",
    "PIPELINE_MODEL_PARALLEL_GROUP": "pp",
    "EMBEDDING_GROUP": "embedding",
    "POSITION_EMBEDDING_GROUP": "position-embedding",
    "DATA_PARALLEL_GROUP": "dp",
    "DATA_PARALLEL_GROUP_WITH_CP": "dp-cp",
    "DATA_PARALLEL_GROUP_WITH_CP_AG": "dp-cp",
    "INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP": "dp-cp",
    "TENSOR_AND_DATA_PARALLEL_GROUP": "tp-dp",
    "TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP": "tp-dp-cp",
    "EXPERT_MODEL_PARALLEL_GROUP": "ep",
    "EXPERT_TENSOR_PARALLEL_GROUP": "etp",
    "EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP": "tp-ep",
    "EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP": "tp-ep-pp",
    "EXPERT_DATA_PARALLEL_GROUP": "expt-dp",
    "INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP": "optimizer-instance",
}
GROUPS = ("", *dict.fromkeys(_GROUP_NAMES.values()), "other")

KIND = {name: code for code, name in enumerate(KINDS)}
FORMAT = {name: code for code, name in enumerate(ARITHMETIC)}
OPERATION = {name: code for code, name in enumerate(OPERATIONS)}
GROUP = {name: code for code, name in enumerate(GROUPS)}


def group_code(description: str) -> int:
    """The code of a process group by the description Megatron-Core makes it with."""
    return GROUP[_GROUP_NAMES.get(description, "other")]


COLUMNS: dict[str, str] = {
    "event": "int64",
    "phase": "int32",
    "module": "int32",
    "kind": "int8",
    "dtype": "int8",
    "m": "int64",
    "n": "int64",
    "k": "int64",
    "batch": "int64",
    "flops": "float64",
    "bytes": "float64",
    "op": "int8",
    "group": "int8",
    "group_size": "int32",
    "asynchronous": "bool",
}
"""Columns of a log in the order of `Row`, with their numpy types."""

Row = tuple[int, int, int, int, int, int, int, int, int, float, float, int, int, int, bool]


@dataclass(frozen=True, slots=True)
class KernelLog:
    """Device operations in issue order; one entry of each array per operation.

    `event` is how many allocation events came before, `phase` and `module` index the name tables
    of the trace. `kind`, `dtype`, `op` and `group` index `KINDS`, `ARITHMETIC`, `OPERATIONS` and
    `GROUPS`. Products are `batch` times `[m, k] x [k, n]`, m being tokens in a forward pass; of
    attention m are query rows, n key rows, k the width of a query head and batch the heads of all
    sequences. `flops` counts a multiply-add twice, and masked scores not at all. `bytes` are moved
    in device memory, by `host_copy` over the link, and of a collective those of the whole tensor:
    gathered, to be scattered, reduced, or held by one rank of an all-to-all. `asynchronous`
    collectives run beside the operations that follow.
    """

    event: NDArray[np.int64]
    phase: NDArray[np.int32]
    module: NDArray[np.int32]
    kind: NDArray[np.int8]
    dtype: NDArray[np.int8]
    m: NDArray[np.int64]
    n: NDArray[np.int64]
    k: NDArray[np.int64]
    batch: NDArray[np.int64]
    flops: NDArray[np.float64]
    bytes: NDArray[np.float64]
    op: NDArray[np.int8]
    group: NDArray[np.int8]
    group_size: NDArray[np.int32]
    asynchronous: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.event)

    @classmethod
    def from_rows(cls, rows: Sequence[Row]) -> KernelLog:
        import numpy as np

        columns: Sequence[Any] = list(zip(*rows, strict=True)) or [()] * len(COLUMNS)
        pairs = zip(COLUMNS.items(), columns, strict=True)
        return cls(**{name: np.array(values, dtype=kind) for (name, kind), values in pairs})

    @classmethod
    def empty(cls) -> KernelLog:
        return cls.from_rows(())

    def select(self, index: Any) -> KernelLog:
        """The rows that a slice, a mask or an array of positions names."""
        return type(self)(**{name: getattr(self, name)[index] for name in COLUMNS})

    def of_kind(self, *kinds: str) -> KernelLog:
        """The rows of these kinds."""
        import numpy as np

        return self.select(np.isin(self.kind, [KIND[kind] for kind in kinds]))

    def to_arrays(self, prefix: str = "") -> dict[str, NDArray[Any]]:
        """The columns by name, for `numpy.savez`."""
        return {prefix + name: getattr(self, name) for name in COLUMNS}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, Any], prefix: str = "") -> KernelLog:
        return cls(**{name: arrays[prefix + name] for name in COLUMNS})


def concatenated(logs: Sequence[KernelLog]) -> KernelLog:
    """One log after the other."""
    import numpy as np

    if not logs:
        return KernelLog.empty()
    return KernelLog(
        **{name: np.concatenate([getattr(log, name) for log in logs]) for name in COLUMNS}
    )
