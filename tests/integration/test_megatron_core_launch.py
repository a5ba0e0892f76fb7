"""Every ending of a trial's processes becomes one result, and none of them is left behind.

The ranks here are small programs, so that each ending can be produced at will; the launcher, its
agent and torch's elastic agent are the real ones.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import psutil
import pytest

from trainables.launch import AGENT_LOG_FILE, run_trial
from trainables.processes import free_port
from tuner.measurement import RESULT_FILE, Outcome, TrialResult, TrialSpec

pytestmark = pytest.mark.slow

WORLD_SIZE = 2
ROOT = Path(__file__).resolve().parents[2]

PREAMBLE = """
import json, os, signal, sys, time
from pathlib import Path
from trainables.processes import die_with_parent
die_with_parent()
rank = int(os.environ["RANK"])
output = Path(sys.argv[sys.argv.index("--output") + 1])
(output / f"pid{rank}").write_text(str(os.getpid()))
"""


@pytest.fixture
def rank_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Write the body of a rank program and return the name of its module."""
    folder = tmp_path / "programs"
    folder.mkdir()
    monkeypatch.setenv("PYTHONPATH", str(folder))

    def write(body: str) -> str:
        (folder / "rank_program.py").write_text(PREAMBLE + textwrap.dedent(body))
        return "rank_program"

    return write


def a_spec(timeout_s: float = 300.0, **config: object) -> TrialSpec:
    return TrialSpec(
        model={},
        config=config,
        world_size=WORLD_SIZE,
        seq_length=1,
        global_batch_size=1,
        timeout_s=timeout_s,
    )


def rank_pids(output: Path) -> list[int]:
    return [int(path.read_text()) for path in output.glob("pid*")]


def wait_for_ranks(output: Path) -> list[int]:
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline:
        pids = [path for path in output.glob("pid*") if path.read_text()]
        if len(pids) == WORLD_SIZE:
            return rank_pids(output)
        time.sleep(0.05)
    raise AssertionError("the ranks did not start")


def assert_gone(pids: list[int], within_s: float = 20.0) -> None:
    alive = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    alive = [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
    _, left = psutil.wait_procs(alive, timeout=within_s)
    assert left == []


def written(output: Path) -> TrialResult:
    return TrialResult.from_json(json.loads((output / RESULT_FILE).read_text()))


def test_a_rank_that_raises_is_named_with_its_exception(tmp_path: Path, rank_program) -> None:
    module = rank_program(
        """
        from torch.distributed.elastic.multiprocessing.errors import record

        @record
        def main():
            if rank == 1:
                raise KeyError("no such layer")
            time.sleep(600)

        main()
        """
    )
    result = run_trial(a_spec(), tmp_path / "out", module=module)
    assert result.outcome is Outcome.CRASHED
    assert result.reason == "rank 1: KeyError: 'no such layer'"
    assert written(tmp_path / "out") == result
    assert result.duration_s < 300  # rank 0 was not waited for
    assert_gone(rank_pids(tmp_path / "out"))


def test_a_rank_killed_by_a_signal_is_told_from_a_crash(tmp_path: Path, rank_program) -> None:
    module = rank_program("os.kill(os.getpid(), signal.SIGKILL) if rank == 0 else time.sleep(600)")
    result = run_trial(a_spec(), tmp_path / "out", module=module)
    assert result.outcome is Outcome.KILLED
    assert result.reason.startswith("rank 0: ")
    assert "SIGKILL" in result.reason


def test_a_failed_allocation_is_out_of_memory(tmp_path: Path, rank_program) -> None:
    module = rank_program(
        """
        import torch
        from torch.distributed.elastic.multiprocessing.errors import record

        @record
        def main():
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

        main()
        """
    )
    result = run_trial(a_spec(), tmp_path / "out", module=module)
    assert result.outcome is Outcome.OOM
    assert result.measurement is None


def test_ranks_that_hang_are_stopped_at_the_timeout(tmp_path: Path, rank_program) -> None:
    module = rank_program("signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)")
    started = time.monotonic()
    result = run_trial(a_spec(timeout_s=20.0), tmp_path / "out", module=module)
    assert result.outcome is Outcome.TIMEOUT
    assert "timeout_s=20" in result.reason
    assert time.monotonic() - started < 20 + 20
    assert len(rank_pids(tmp_path / "out")) == WORLD_SIZE
    assert_gone(rank_pids(tmp_path / "out"))


def test_processes_that_ranks_started_are_stopped_too(tmp_path: Path, rank_program) -> None:
    module = rank_program(
        """
        import subprocess
        child = subprocess.Popen(["sleep", "600"], start_new_session=True)
        (output / f"pid{rank}").write_text(str(child.pid))
        time.sleep(600)
        """
    )
    cancel = threading.Event()
    results: list[TrialResult] = []
    thread = threading.Thread(
        target=lambda: results.append(
            run_trial(a_spec(), tmp_path / "out", module=module, cancel=cancel)
        )
    )
    thread.start()
    pids = wait_for_ranks(tmp_path / "out")
    cancel.set()
    thread.join(timeout=60)
    assert [result.outcome for result in results] == [Outcome.INTERRUPTED]
    assert_gone(pids)


def start_run(tmp_path: Path, module: str) -> subprocess.Popen[bytes]:
    """`run_trial` in a process of its own, to be signalled."""
    code = (
        "import sys; from pathlib import Path; from trainables.launch import run_trial;"
        "from tuner.measurement import TrialSpec;"
        f"run_trial(TrialSpec({{}}, {{}}, {WORLD_SIZE}, 1, 1), Path(sys.argv[1]),"
        f" module={module!r})"
    )
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")])
    return subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "out")],
        env=environment,
        stderr=subprocess.DEVNULL,
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_process_outlives_the_one_that_ran_the_trial(
    tmp_path: Path, rank_program, number: signal.Signals
) -> None:
    module = rank_program("signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)")
    runner = start_run(tmp_path, module)
    try:
        pids = wait_for_ranks(tmp_path / "out")
        agents = [process.pid for process in psutil.Process(runner.pid).children()]
        runner.send_signal(number)
        runner.wait(timeout=60)
    finally:
        runner.kill()
        runner.wait()
    assert agents
    assert_gone(pids + agents)
    if number is signal.SIGINT:
        assert written(tmp_path / "out").outcome is Outcome.INTERRUPTED


def test_the_candidates_environment_reaches_every_rank(tmp_path: Path, rank_program) -> None:
    module = rank_program(
        """
        names = ["PYTORCH_CUDA_ALLOC_CONF", "OMP_NUM_THREADS"]
        (output / f"env{rank}.json").write_text(json.dumps([os.environ[n] for n in names]))
        """
    )
    config = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "OMP_NUM_THREADS": 3}
    run_trial(a_spec(env=config), tmp_path / "out", module=module)
    for rank in range(WORLD_SIZE):
        found = json.loads((tmp_path / "out" / f"env{rank}.json").read_text())
        assert found == ["expandable_segments:True", "3"]


def test_ranks_that_end_well_without_a_result_are_a_crash(tmp_path: Path, rank_program) -> None:
    result = run_trial(a_spec(), tmp_path / "out", module=rank_program("pass"))
    assert result.outcome is Outcome.CRASHED
    assert AGENT_LOG_FILE in result.reason


def test_a_result_of_an_earlier_run_is_not_taken_for_this_one(tmp_path: Path, rank_program) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / RESULT_FILE).write_text(
        json.dumps(TrialResult(Outcome.COMPLETED).to_json())
    )
    result = run_trial(a_spec(), tmp_path / "out", module=rank_program("pass"))
    assert result.outcome is Outcome.CRASHED


def test_two_nodes_join_one_job(tmp_path: Path, rank_program) -> None:
    module = rank_program(
        """
        import torch
        from datetime import timedelta
        torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=240))
        total = torch.tensor(rank)
        torch.distributed.all_reduce(total)
        result = {"outcome": "completed", "reason": f"sum {int(total)}", "measurement": None}
        (output / "result.json").write_text(json.dumps(result))
        torch.distributed.destroy_process_group()
        """
    )
    with_port = free_port("127.0.0.1")
    results: dict[int, TrialResult] = {}

    def node(node_rank: int) -> None:
        results[node_rank] = run_trial(
            a_spec(),
            tmp_path / f"node{node_rank}",
            module=module,
            node_rank=node_rank,
            nnodes=2,
            master_port=with_port,
        )

    threads = [threading.Thread(target=node, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=300)
    assert [results[rank].reason for rank in range(2)] == ["sum 1", "sum 1"]
