"""Micro-benchmarks between ranks: NCCL between the GPUs of this machine, gloo between processes.

`measure_ranks` starts one process per rank; `python -m tuner.timing.microbench_ranks` is what each
of them runs. Ranks on a CPU share its caches and memory, so there operations are measured with
every core at work, too.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainables.processes import free_port
from tuner.timing.microbench import Clock, Launches, Sample, measure_device

if TYPE_CHECKING:
    import torch

_SIZES = {
    "cuda": (1 << 16, 1 << 20, 1 << 24, 1 << 27),
    "cpu": (1 << 14, 1 << 18, 1 << 22, 1 << 25),
}
OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")


_IN_A_ROW = 4
"""Collectives timed together: ranks of a training step do not meet before each."""


@dataclass(frozen=True, slots=True)
class RankSamples:
    """What ranks measured: operations of a core while all cores work, and collectives."""

    operations: tuple[Sample, ...]
    launches: Launches | None
    collectives: tuple[Sample, ...]


def measure_ranks(
    device: str, ranks: int, *, seconds: float, operations_s: float = 0.0
) -> RankSamples:
    """Samples of every collective and size between `ranks` ranks of this machine.

    With `operations_s`, as many ranks as there are cores first measure operations at once for that
    long. Raises RuntimeError with the end of a rank's log when one fails, or takes much longer.
    """
    if ranks < 2 and not operations_s:
        return RankSamples((), None, ())
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder) / f"{rank}.log" for rank in range(ranks)]
        answer = Path(folder) / "samples.json"
        port, arguments = (
            free_port("127.0.0.1"),
            (device, str(seconds), str(operations_s), str(answer)),
        )
        started = [_start(arguments, rank, ranks, port, log) for rank, log in enumerate(logs)]
        deadline = time.monotonic() + 60 + 10 * (seconds + operations_s)
        try:
            for process, log in zip(started, logs, strict=True):
                if process.wait(timeout=max(1.0, deadline - time.monotonic())):
                    raise RuntimeError(f"a rank failed: {log.read_text()[-2000:]}")
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"ranks hang: {logs[0].read_text()[-2000:]}") from None
        finally:
            for process in started:
                process.kill()
                process.wait()
        found = json.loads(answer.read_text())
    launches = found["launches"]
    return RankSamples(
        tuple(Sample(**entry) for entry in found["operations"]),
        None if launches is None else Launches(**launches),
        tuple(Sample(**entry) for entry in found["collectives"]),
    )


def _start(
    arguments: Sequence[str], rank: int, ranks: int, port: int, log: Path
) -> subprocess.Popen[bytes]:
    environment = {
        **os.environ,
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }
    if arguments[0] == "cpu" and sys.platform == "linux":
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    root = str(Path(__file__).resolve().parents[2])
    paths = [root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    with log.open("wb") as output:
        return subprocess.Popen(
            [sys.executable, "-m", __name__, *arguments],
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
        )


def _run_rank(device: str, seconds: float, operations_s: float, answer: Path) -> None:
    import torch
    import torch.distributed as dist

    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    dist.barrier()
    operations: list[Sample] = []
    launches = None
    if operations_s and rank < cores():
        operations, launches = measure_device(device, seconds=operations_s)
    dist.barrier()
    collectives = []
    each = seconds / (len(OPERATIONS) * len(_SIZES[device]))
    for operation in OPERATIONS if ranks > 1 else ():
        for size in _SIZES[device]:
            sample = _collective(device, operation, size, ranks, each)
            if sample is not None:
                collectives.append(sample)
    if rank == 0:
        found = {
            "operations": [sample.to_json() for sample in operations],
            "launches": None if launches is None else asdict(launches),
            "collectives": [sample.to_json() for sample in collectives],
        }
        answer.write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def cores() -> int:
    """Cores that this process and its ranks may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def _collective(device: str, operation: str, size: int, ranks: int, each: float) -> Sample | None:
    """The slowest rank's time of one operation over tensors of `size` bytes."""
    import numpy as np
    import torch
    import torch.distributed as dist

    count = size // 4 // ranks * ranks
    whole = torch.zeros(count, device=device)
    part = torch.zeros(count // ranks, device=device)
    run = _call(operation, whole, part)
    try:
        run()
    except RuntimeError:  # a backend without this operation, the same on every rank
        return None
    clock = Clock(device, each)

    def in_a_row() -> None:
        for _ in range(_IN_A_ROW):
            run()

    times = torch.tensor(
        [_together(clock, in_a_row) for _ in range(_repetitions(clock, in_a_row, each))]
    )
    times = times.to(device) / _IN_A_ROW
    dist.all_reduce(times, op=dist.ReduceOp.MAX)
    low, middle, high = np.percentile(times.cpu().numpy(), [25, 50, 75])
    return Sample(
        *("collective", "", float(middle), float((high - low) / middle)),
        bytes=float(4 * count),
        operation=operation,
        group_size=2 if operation == "send" else ranks,
    )


def _together(clock: Clock, run: Callable[[], object]) -> float:
    import torch.distributed as dist

    dist.barrier()
    return clock.once(run)


def _repetitions(clock: Clock, run: Callable[[], object], each: float) -> int:
    """How often all ranks repeat it: as often as the slowest can."""
    import torch
    import torch.distributed as dist

    once = torch.tensor([_together(clock, run)], device=clock.device)
    dist.all_reduce(once, op=dist.ReduceOp.MAX)
    return int(min(50, max(3, each / 2 / max(float(once), 1e-6))))


def _call(operation: str, whole: torch.Tensor, part: torch.Tensor) -> Callable[[], object]:
    import torch
    import torch.distributed as dist

    rank, ranks = dist.get_rank(), dist.get_world_size()
    spare = torch.zeros_like(whole)

    def send() -> Any:
        """Even ranks send to the next one."""
        if rank ^ 1 >= ranks:
            return None
        return dist.recv(spare, rank - 1) if rank % 2 else dist.send(whole, rank + 1)

    return {
        "all_reduce": lambda: dist.all_reduce(whole),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, part),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole),
        "all_to_all": lambda: dist.all_to_all_single(spare, whole),
        "send": send,
    }[operation]


def without_outliers(samples: Sequence[Sample], most: float = 1.0) -> list[Sample]:
    """Samples whose times agree; of an operation without any, the steadiest with its spread."""
    kept = [sample for sample in samples if sample.spread <= most]
    missing = {s.operation for s in samples} - {s.operation for s in kept}
    for operation in sorted(missing):
        mine = [sample for sample in samples if sample.operation == operation]
        kept.append(replace(min(mine, key=lambda sample: sample.spread)))
    return kept


if __name__ == "__main__":
    _run_rank(sys.argv[1], float(sys.argv[2]), float(sys.argv[3]), Path(sys.argv[4]))
