"""Each way for a trial to fail is caused for real, and gets its own outcome and evidence.

The ranks are small programs forked from a warm template, as those of real trials are.
"""

from __future__ import annotations

import contextlib
import json
import os
import textwrap
import threading
from pathlib import Path

import psutil
import pytest

from trainables.agent import AgentTask
from trainables.launch import rank_environment, run_trial
from trainables.warm import Template, template_environment
from tuner.measurement import Outcome, TrialResult, TrialSpec

pytestmark = pytest.mark.slow

WORLD_SIZE = 2
PREAMBLE = """
import ctypes, json, os, signal, sys, time
from pathlib import Path
from trainables.error_file import recording_errors
from trainables.processes import die_with_parent
from trainables.progress import write_progress
die_with_parent()
rank = int(os.environ["RANK"])
output = Path(sys.argv[sys.argv.index("--output") + 1])
(output / f"pid{rank}-{os.getpid()}").touch()  # whole at once: it may be killed any time
"""
NCCL_ERROR = (
    "NCCL error in: ProcessGroupNCCL.cpp:3690, unhandled system error, NCCL version 2.27.5 "
    "ncclSystemError: System call (e.g. socket, malloc) or external library call failed"
)
FRAGMENTED = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB of "
    "which 1.50 GiB is free. Of the allocated memory 60.00 GiB is allocated by PyTorch, and 15.00 "
    "GiB is reserved by PyTorch but unallocated."
)


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    return tmp_path_factory.mktemp("programs")


@pytest.fixture(scope="module")
def template(programs):
    """A template that has torch, which launchers and collectives need, and no more."""
    (programs / "light.py").write_text("def preload(device):\n    import torch.distributed\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(programs))
        patch.delenv("PYTEST_CURRENT_TEST", raising=False)
        environment = template_environment(rank_environment(a_spec(), 1))
    template = Template("light", "cpu", environment)
    template.start()
    yield template
    template.close()


def assert_gone(pids: list[int]) -> None:
    processes = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            processes.append(psutil.Process(pid))
    _, left = psutil.wait_procs(processes, timeout=20)
    assert all(process.status() == psutil.STATUS_ZOMBIE for process in left)


def a_spec(**changes) -> TrialSpec:
    fields = {"timeout_s": 300.0, "hang_after_s": 60.0, "config": {}, **changes}
    return TrialSpec(model={}, world_size=WORLD_SIZE, seq_length=1, global_batch_size=1, **fields)


@pytest.fixture
def run(tmp_path, programs, template, monkeypatch):
    """Run a rank program's body as a trial; no process of it may be left."""

    def run(body: str, *, cancel: threading.Event | None = None, **changes) -> TrialResult:
        # It changes from test to test, and a template serves one environment.
        monkeypatch.delenv("PYTEST_CURRENT_TEST", raising=False)
        name = f"program{len(list(programs.iterdir()))}"
        (programs / f"{name}.py").write_text(PREAMBLE + textwrap.dedent(body))
        result = run_trial(
            a_spec(**changes), tmp_path / "out", module=name, template=template, cancel=cancel
        )
        pids = [int(path.name.split("-")[1]) for path in (tmp_path / "out").glob("pid*")]
        assert_gone(pids)
        assert (tmp_path / "out" / "logs" / "node0").exists()  # not a plain launch
        return result

    return run


@pytest.mark.parametrize(
    ("body", "outcome", "words"),
    [
        ("ctypes.string_at(0) if rank else time.sleep(99)", Outcome.SEGFAULT, "SIGSEGV"),
        ("os.kill(os.getpid(), 9) if rank else time.sleep(99)", Outcome.KILLED, "SIGKILL"),
        ("os.kill(os.getppid(), 9); time.sleep(99)", Outcome.KILLED, "launcher"),
        ("os.kill(os.getppid(), 15); time.sleep(99)", Outcome.PREEMPTED, "SIGTERM"),
        ("os.kill(os.getpid(), 15); time.sleep(99)", Outcome.PREEMPTED, "SIGTERM"),
        ("sys.exit(3)", Outcome.CRASHED, "exit code 3"),
        ("pass", Outcome.CRASHED, "without a result"),
    ],
)
def test_ends_of_processes(run, body, outcome, words):
    result = run(body)
    assert result.outcome is outcome
    assert words in result.reason


@pytest.mark.parametrize(
    ("statement", "outcome"),
    [
        ("open('/dev/full', 'wb', buffering=0).write(b'x')", Outcome.DISK_FULL),
        (f"raise RuntimeError({NCCL_ERROR!r})", Outcome.COMMUNICATION),
        ("raise MemoryError()", Outcome.OOM),
        ("raise KeyError('no such layer')", Outcome.CRASHED),
    ],
)
def test_what_a_rank_raises(run, statement, outcome):
    result = run(f"recording_errors(lambda: exec({statement!r}))() if rank else time.sleep(99)")
    assert result.outcome is outcome
    assert result.reason.startswith("rank 1: ")
    assert result.evidence["failed_ranks"] == [1]
    assert any("Error" in line for line in result.evidence["log"])
    assert result.evidence["traceback"]


def test_a_fragmented_allocator_is_told_from_a_full_one(run):
    body = f"""
        import torch
        def fail():
            raise torch.OutOfMemoryError({FRAGMENTED!r})
        recording_errors(fail)()
    """
    memory = run(body).evidence["memory"]
    assert memory["kind"] == "oom_fragmentation"
    assert memory["reserved_unallocated_bytes"] == 15 * 2**30
    again = run(body, config={"env": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}})
    assert again.evidence["memory"]["kind"] == "oom_capacity"


def test_a_collective_that_a_peer_never_joins_is_a_communication_failure(run):
    result = run(
        """
        import torch
        from datetime import timedelta
        def meet():
            torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=60))
            group = torch.distributed.new_group(timeout=timedelta(seconds=1))
            if rank == 0:
                torch.distributed.all_reduce(torch.ones(1), group=group)
            time.sleep(99)
        recording_errors(meet)()
        """
    )
    assert result.outcome is Outcome.COMMUNICATION
    assert "rank 0" in result.reason


def test_a_stopped_rank_is_a_hang_with_stacks(run, tmp_path):
    result = run(
        """
        for step in range(1, 4):
            if rank == 0:
                write_progress(output, 0, "step", step)
            time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGSTOP) if rank else time.sleep(99)
        """,
        hang_after_s=2.0,
    )
    assert result.outcome is Outcome.HUNG
    assert "after 3 steps" in result.reason
    assert "stopped" in result.evidence["processes"].values()
    assert "process" in (tmp_path / "out" / "stacks.txt").read_text()


def test_slow_steps_are_no_hang(run):
    result = run(
        """
        for step in range(1, 4):
            if rank == 0:
                write_progress(output, 0, "step", step)
            time.sleep(1.0)
        time.sleep(6.0)
        if rank == 0:
            done = {"outcome": "completed", "reason": "", "measurement": None}
            (output / "result.json").write_text(json.dumps(done))
        """,
        hang_after_s=4.0,
    )
    assert result.outcome is Outcome.COMPLETED


def test_ranks_see_each_other_and_the_candidates_variables(run, tmp_path):
    result = run(
        """
        import torch
        torch.distributed.init_process_group("gloo")
        total = torch.tensor(rank + 1)
        torch.distributed.all_reduce(total)
        (output / f"seen{rank}.json").write_text(
            json.dumps([int(total), os.environ["PYTORCH_CUDA_ALLOC_CONF"]])
        )
        torch.distributed.destroy_process_group()
        """,
        config={"env": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}},
    )
    assert result.outcome is Outcome.CRASHED  # they wrote no result
    for rank in range(WORLD_SIZE):
        seen = json.loads((tmp_path / "out" / f"seen{rank}.json").read_text())
        assert seen == [3, "expandable_segments:True"]


def test_variables_that_imports_read_and_a_dead_template_lead_to_a_plain_launch(template):
    environment = dict(template._environment)
    assert template.suits({**environment, "CUDA_VISIBLE_DEVICES": "0,1"})
    assert not template.suits({**environment, "NVTE_FUSED_ATTN": "0"})
    assert not template.suits({**environment, "PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"})
    gone = Template("no_such_module", "cpu", environment)
    task = AgentTask("x", [], os.devnull, 1, 0, 1, "127.0.0.1", 0)
    assert gone.launch(task, environment, Path(os.devnull)) is None


def test_a_cancelled_trial_is_gone_at_once(run):
    cancel = threading.Event()
    threading.Timer(1.0, cancel.set).start()
    assert run("time.sleep(99)", cancel=cancel).outcome is Outcome.INTERRUPTED
