"""Trials of any program: real processes over Gloo, started as a user would start them."""

from __future__ import annotations

import os
import signal
import textwrap
import threading
import time
from pathlib import Path

import psutil
import pytest

import trainables
from trainables.processes import free_port
from tuner.measurement import Outcome, TrialSpec

pytestmark = pytest.mark.slow

SCRIPT = """
import argparse, os, time
import torch

parser = argparse.ArgumentParser()
parser.add_argument("--micro-batch-size", type=int)
parser.add_argument("--train-iters", type=int)
options = parser.parse_args()
torch.distributed.init_process_group("gloo")
rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
weight = torch.zeros(8, requires_grad=True)
for iteration in range(1, options.train_iters + 1):
    started = time.perf_counter()
    loss = ((weight - 1) ** 2).mean()
    loss.backward()
    torch.distributed.all_reduce(weight.grad)
    with torch.no_grad():
        weight -= weight.grad / world
        weight.grad = None
    if rank == world - 1:
        ms = (time.perf_counter() - started) * 1000
        print(f"[t] iteration {iteration:8d}/{options.train_iters:8d} | consumed samples: 1 | "
              f"elapsed time per iteration (ms): {ms:.3f} | "
              f"lm loss: {loss.item():.6E} |", flush=True)
print(f"[Rank {rank}] (after 2 iterations) memory (MB) | allocated: 1.0 | "
      f"max allocated: {100 + rank}.5 | reserved: 1.0 | max reserved: 200.0", flush=True)
print("HF_TOKEN=" + os.environ["HF_TOKEN"], flush=True)
"""
SECRET = "planted-secret-value-42"


def a_spec(folder: Path, body: str = "", *more: str, per: str = "node") -> TrialSpec:
    """A trial of a script: of SCRIPT under torchrun, or of `body` started as it is."""
    script = folder / "train.py"
    script.write_text(textwrap.dedent(body or SCRIPT))
    launch = ["{python}"]
    if not body:
        launch += ["-m", "torch.distributed.run", "--nproc-per-node={ranks_per_node}"]
        launch += ["--nnodes={nnodes}", "--node-rank={node_rank}", "--master-addr={master_addr}"]
        launch += ["--master-port={master_port}"]
    launch += [str(script), *more]
    if not body:
        launch += ["--micro-batch-size", "{micro_batch_size}", "--train-iters={steps}"]
    return TrialSpec(
        model={"num_layers": 1, "hidden_size": 8, "num_attention_heads": 1, "vocab_size": 16}
        | {"position_embedding_type": "rope"},
        config={"micro_batch_size": 2, "env": {"HF_TOKEN": SECRET}},
        world_size=2,
        seq_length=16,
        global_batch_size=8,
        warmup_steps=2,
        measure_steps=3,
        timeout_s=300,
        options={"launch": launch, "per": per, "log": "megatron"},
    )


def test_two_nodes_run_one_command_each_and_report_together(tmp_path: Path) -> None:
    spec = a_spec(tmp_path)
    place = {"nnodes": 2, "master_addr": "127.0.0.1", "master_port": free_port("127.0.0.1")}
    results: dict[int, object] = {}

    def node(number: int) -> None:
        results[number] = trainables.get("command").run_trial(
            spec, tmp_path / f"node{number}", node_rank=number, **place
        )

    threads = [threading.Thread(target=node, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    result = results[0]
    assert result.outcome is Outcome.COMPLETED, result.reason
    measured = result.measurement
    assert measured is not None
    # Only the second node's command prints the steps; both nodes know them.
    assert measured == results[1].measurement
    assert len(measured.losses) == 5
    assert measured.losses[0] == 1.0
    assert measured.losses[-1] < 0.2
    assert len(measured.step_times_s) == 3
    assert 0 < measured.step_time_s < 5
    assert measured.peak_memory_allocated_bytes == int(101.5 * 2**20)
    assert [rank.rank for rank in measured.ranks] == [0, 1]
    logs = [file.read_text() for file in tmp_path.rglob("command-*.log")]
    assert any("HF_TOKEN=" in log for log in logs)
    assert not any(SECRET in log for log in logs)


def test_a_failing_rank_is_named_by_its_most_telling_line(tmp_path: Path) -> None:
    body = """
        import os, sys, time
        print("iteration 1/ 5 | elapsed time per iteration (ms): 12.5 | lm loss: 1.0 |", flush=True)
        if os.environ["RANK"] == "0":
            time.sleep(600)
        print("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB")
        print("shutting down")
        sys.exit(3)
    """
    result = trainables.get("command").run_trial(a_spec(tmp_path, body, per="rank"), tmp_path / "o")
    assert result.outcome is Outcome.OOM
    assert "Tried to allocate 2.00 GiB" in result.reason


def test_nothing_is_left_of_a_command_whose_launcher_is_killed(tmp_path: Path) -> None:
    body = """
        import os, subprocess, sys, time
        if len(sys.argv) > 1:
            rank = [sys.executable, sys.argv[0]]
            subprocess.Popen(rank, start_new_session=True)
            print("started", flush=True)
        time.sleep(600)
    """
    spec = a_spec(tmp_path, body, "as-launcher")
    cancel = threading.Event()
    family: list[psutil.Process] = []

    def kill_the_launcher() -> None:
        log = tmp_path / "out" / "command-0.log"
        deadline = time.monotonic() + 240
        while time.monotonic() < deadline and not (log.exists() and log.read_text()):
            time.sleep(0.05)
        family.extend(p for p in psutil.process_iter(["cmdline"]) if _runs(p, tmp_path))
        launcher = next(p for p in family if "as-launcher" in p.info["cmdline"])
        os.kill(launcher.pid, signal.SIGKILL)  # leaves its rank to the init process

    threading.Thread(target=kill_the_launcher).start()
    result = trainables.get("command").run_trial(spec, tmp_path / "out", cancel=cancel)
    assert result.outcome is not Outcome.COMPLETED
    assert len(family) == 2
    _, alive = psutil.wait_procs(family, timeout=10)
    assert alive == []


def _runs(process: psutil.Process, folder: Path) -> bool:
    return (
        str(folder / "train.py") in (process.info["cmdline"] or []) and process.status() != "zombie"
    )
