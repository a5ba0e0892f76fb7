"""What `tuner diagnose` reads out of a log, and what it does not claim."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tuner.diagnose import diagnose
from tuner.diagnose.log import read_log
from tuner.diagnose.memory import kind_of, read_numbers

GIB = 2**30
NEW = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 3 has a total "
    "capacity of 79.11 GiB of which 1.02 GiB is free. Process 77 has 12.00 GiB memory in use. "
    "Including non-PyTorch memory, this process has 66.00 GiB memory in use. Of the allocated "
    "memory 60.25 GiB is allocated by PyTorch, with 3.50 GiB allocated in private pools (e.g., "
    "CUDA Graphs), and 4.50 GiB is reserved by PyTorch but unallocated."
)
OLD = (
    "CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 39.59 GiB total capacity; 36.10 GiB "
    "already allocated; 1.12 GiB free; 36.90 GiB reserved in total by PyTorch)"
)


def test_numbers_of_the_present_wording() -> None:
    numbers = read_numbers(NEW)
    assert numbers.requested_bytes == 2 * GIB
    assert numbers.capacity_bytes == int(79.11 * GIB)
    assert numbers.free_bytes == int(1.02 * GIB)
    assert numbers.allocated_bytes == int(60.25 * GIB)
    assert numbers.graph_pools_bytes == int(3.5 * GIB)
    assert numbers.reserved_unallocated_bytes == int(4.5 * GIB)
    assert (numbers.process_bytes, numbers.other_processes_bytes) == (66 * GIB, 12 * GIB)
    assert numbers.gpu == 3


def test_numbers_of_the_old_wording() -> None:
    numbers = read_numbers(OLD)
    assert numbers.requested_bytes == 20 * 2**20
    assert numbers.reserved_unallocated_bytes == int(36.9 * GIB) - int(36.1 * GIB)
    assert numbers.other_processes_bytes is None


def test_unused_reserved_memory_is_fragmentation_only_without_expandable_segments() -> None:
    numbers = read_numbers(NEW.replace("Process 77 has 12.00 GiB memory in use. ", ""))
    assert kind_of(numbers, expandable=False)[0] == "oom_fragmentation"
    assert kind_of(numbers, expandable=True)[0] == "oom_capacity"


def test_a_single_process_listed_in_a_container_is_our_own() -> None:
    numbers = read_numbers("Tried to allocate 1.00 GiB. Process 9 has 70.00 GiB memory in use.")
    assert (numbers.process_bytes, numbers.other_processes_bytes) == (70 * GIB, None)


def test_the_suggestion_in_the_message_is_not_taken_for_the_environment() -> None:
    suggestion = " try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid"
    numbers_text = NEW.replace("Process 77 has 12.00 GiB memory in use. ", "")
    found = diagnose(f"[rank3]: {numbers_text} If memory is large{suggestion}", mcore="0.19")
    assert found.cause is not None
    assert found.cause.cause == "oom_fragmentation"
    assert found.cause.fix.env == {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}


@pytest.mark.parametrize(
    ("raw", "rank", "text"),
    [
        ("[rank3]: ValueError: x", 3, "ValueError: x"),
        ("\x1b[36m(RayTrainWorker pid=41)\x1b[0m [rank2]: boom", 41, "boom"),
        ("  12: Traceback (most recent call last):", 12, "Traceback (most recent call last):"),
        ("[default7]:RuntimeError: y", 7, "RuntimeError: y"),
        ("E1130 00:00:34.306000 14055 torch/api.py:836] ValueError: z", None, "ValueError: z"),
        (" iteration       12/     100 |", None, " iteration       12/     100 |"),
    ],
)
def test_prefixes_of_launchers_are_taken_off(raw: str, rank: int | None, text: str) -> None:
    (line,) = read_log(raw).lines
    assert (line.rank, line.text) == (rank, text)


def test_a_rule_fixes_the_configuration_that_the_log_prints() -> None:
    log = "\n".join(
        [
            "------------------------ arguments ------------------------",
            "  hidden_size ................ 4096",
            "  num_attention_heads ........ 32",
            "  num_layers ................. 32",
            "  sequence_parallel .......... True",
            "  tensor_model_parallel_size . 1",
            "ValueError: Cannot use sequence parallelism without tensor parallelism",
        ]
    )
    cause = diagnose(log, mcore="0.19").cause
    assert cause is not None
    assert cause.rule == "P01"
    assert cause.fix.changes == {"sequence_parallel": False}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "WARNING: NCCL_DEBUG is not set\nsetting number of microbatches to constant 16\n",
        "UserWarning: Apex is not installed. Falling back to Torch Norm\n",
        "deprecated: error_handling of this option will be removed\n",
        "NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM\nloading data ... done\n",
        "Retrying after error in telemetry upload (harmless)\n",
    ],
)
def test_harmless_lines_are_no_cause(text: str) -> None:
    assert diagnose(text, mcore="0.19").cause is None


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=400))
def test_any_text_gets_an_answer(text: str) -> None:
    document = diagnose(text, mcore="0.16").to_json()
    assert document["outcome"] in ("failed", "completed", "incomplete")


def test_a_long_log_is_read_in_reasonable_time() -> None:
    line = " iteration {:8d}/  100000 | elapsed time per iteration (ms): 812.3 | lm loss: 1.0E+00 |"
    text = "\n".join(line.format(number) for number in range(20_000))
    started = time.process_time()
    found = diagnose(text, mcore="0.19")
    assert found.iterations == 19_999
    assert time.process_time() - started < 60


@pytest.mark.parametrize(
    "line",
    [
        " iteration 5/ 100 | elapsed time per iteration (ms): 2411....... | lm loss: 1.0E+01 |",
        f" iteration {'9' * 3000}/ 100 | elapsed time per iteration (ms): {'9' * 900} |",
        "[Rank 0] (after 2 iterations) memory (MB) | max allocated: ... | max reserved: 1..2",
        f"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {'9' * 400}.00 GiB.",
        f"[Rank {'7' * 40}] memory (MB) | allocated: 1 | max allocated: 12.5 |",
    ],
)
def test_numbers_that_are_none_are_passed_over(line) -> None:
    diagnose(line, mcore="0.16.1")
