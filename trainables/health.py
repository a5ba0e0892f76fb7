"""A short check of a node: arithmetic, copies and a collective on all its devices.

Run like a trial's ranks (`python -m trainables.health --spec FILE --output DIR`); the result's
evidence holds the rate of the slowest rank in each test. A wrong sum, an error or a timeout fails
the node; how slow is too slow is for the caller to say, who knows the other nodes.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

from trainables.processes import die_with_parent
from trainables.rank_program import run_program
from tuner.measurement import (
    RESULT_FILE,
    Outcome,
    TrialResult,
    TrialSpec,
    write_json_atomically,
)

_SIZES = {"cpu": (256, 1 << 22, 1 << 20), "cuda": (8192, 1 << 28, 1 << 26)}
"""By device: rows of the square matrices, bytes copied, bytes reduced."""
_SECONDS = {"cpu": 0.3, "cuda": 2.0}
_JOIN_TIMEOUT_S = 60.0


def main() -> None:
    """Check this rank's device together with the others; the first rank writes the result."""
    die_with_parent()
    run_program("trainables.health", __doc__, check_rank)


def check_rank(spec_file: Path, output_dir: Path) -> None:
    """Measure, agree on the slowest rank's rates, and report. Raises RuntimeError on wrong sums."""
    import torch

    spec = TrialSpec.from_json(json.loads(spec_file.read_text()))
    on_gpu = spec.device == "cuda"
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.distributed.init_process_group(
        "nccl" if on_gpu else "gloo", timeout=timedelta(seconds=_JOIN_TIMEOUT_S)
    )
    rates = measure(spec.device, spec.world_size)
    slowest = torch.tensor(list(rates.values()), device=spec.device)
    torch.distributed.all_reduce(slowest, op=torch.distributed.ReduceOp.MIN)
    if int(os.environ["RANK"]) == 0:
        health = dict(zip(rates, (round(value, 3) for value in slowest.tolist()), strict=True))
        result = TrialResult(Outcome.COMPLETED, evidence={"health": health})
        write_json_atomically(output_dir / RESULT_FILE, result.to_json())
    torch.distributed.destroy_process_group()


def measure(device: str, world_size: int) -> dict[str, float]:
    """This rank's TFLOP/s of products, GB/s (10^9) of copies to and from, and of reductions."""
    import torch

    rows, copied, reduced = _SIZES[device]
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    left = torch.randn(rows, rows, device=device, dtype=dtype)
    host = torch.ones(copied, dtype=torch.uint8, pin_memory=device == "cuda")
    there = torch.empty(copied, dtype=torch.uint8, device=device)
    vector = torch.ones(reduced // 4, device=device)

    def copy() -> None:
        there.copy_(host, non_blocking=True)
        host.copy_(there, non_blocking=True)

    def reduce() -> None:
        vector.fill_(1.0)
        torch.distributed.all_reduce(vector)

    rates = {
        "gemm_tflops": 2 * rows**3 / _seconds_of(lambda: left @ left, device) / 1e12,
        "copy_gb_per_s": 2 * copied / _seconds_of(copy, device) / 1e9,
        "collective_gb_per_s": reduced / _seconds_of(reduce, device, counted=4) / 1e9,
    }
    if not bool((vector == world_size).all()):
        raise RuntimeError(f"a sum over {world_size} ranks came out as {vector.max().item()}")
    return rates


def _seconds_of(call: Callable[[], object], device: str, counted: int | None = None) -> float:
    """Seconds of one call: over a fixed number of them, or over some time, after a first."""
    import torch

    def wait() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    call()
    wait()
    started, calls = time.perf_counter(), 0
    while calls < counted if counted else time.perf_counter() - started < _SECONDS[device]:
        call()
        calls += 1
        if not counted and calls % 8 == 0:
            wait()
    wait()
    return (time.perf_counter() - started) / calls


if __name__ == "__main__":
    main()
