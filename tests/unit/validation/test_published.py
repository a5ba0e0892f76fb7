"""Reading rows: units, rank definitions, files."""

from __future__ import annotations

import gzip
import json

import pytest

from tuner.errors import InputError
from tuner.validation.published import (
    FIRST,
    LARGEST,
    LAST,
    measured_memory,
    read_rows,
    source_of,
)

GIB = 1 << 30


def row(**measured) -> dict:
    return {"id": "some-kind-0007", "measured": measured}


@pytest.mark.parametrize(
    ("unit", "expected"),
    [("GiB", 10 * GIB), ("GB (1e9, Bridge logger)", 10**10), ("GB", 10**10), (None, 10**10)],
)
def test_the_published_unit_is_honoured(unit, expected):
    found = measured_memory(row(peak_mem_allocated_gb=10, mem_unit=unit))
    assert found is not None
    assert found.allocated_bytes == expected


@pytest.mark.parametrize(
    ("definition", "rank"),
    [
        ("peak on the TensorBoard-writing rank (the LAST global rank, hence last PP stage)", LAST),
        ("max over ALL ranks of torch.cuda.max_memory_allocated()", LARGEST),
        ("rank-0 reported peak", FIRST),
        (None, FIRST),
    ],
)
def test_the_published_rank_is_honoured(definition, rank):
    found = measured_memory(row(peak_mem_allocated_gb=1, mem_definition=definition))
    assert found is not None
    assert found.rank == rank


def test_exact_bytes_win_over_rounded_figures():
    raw = {"mem_max_allocated_bytes": 60700000123.0, "mem_allocated_bytes_after_step": 24.5e9}
    found = measured_memory(row(peak_mem_allocated_gb=60.7, mem_unit="GB", raw=raw))
    assert found is not None
    assert (found.allocated_bytes, found.static_bytes) == (60700000123, 24500000000)


def test_values_per_rank_are_bytes():
    raw = {"peak_memory_by_rank_mb": {"3": {"max_allocated_mb": 2.0, "max_reserved_mb": 4.0}}}
    found = measured_memory(row(peak_mem_allocated_gb=1, mem_unit="GiB", raw=raw))
    assert found is not None
    assert found.by_rank == {3: (2 << 20, 4 << 20)}


def test_a_row_without_memory_and_outcome_is_none():
    assert measured_memory(row(tflops_per_gpu=400)) is None


def test_an_outcome_alone_is_enough():
    found = measured_memory(row(oom=True))
    assert found is not None
    assert found.out_of_memory is True


def test_the_source_is_the_id_without_its_number():
    assert source_of(row()) == "some-kind"


@pytest.mark.parametrize("compressed", [False, True])
def test_rows_are_read_from_plain_and_compressed_files(tmp_path, compressed):
    text = json.dumps(row(oom=False)) + "\n\n"
    path = tmp_path / ("rows.jsonl.gz" if compressed else "rows.jsonl")
    path.write_bytes(gzip.compress(text.encode()) if compressed else text.encode())
    assert [r["id"] for r in read_rows(path)] == ["some-kind-0007"]


@pytest.mark.parametrize("line", ["{", "[]", '{"id": "x"}', '{"measured": {}}'])
def test_a_damaged_row_is_refused_with_its_line(tmp_path, line):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row()) + "\n" + line + "\n", encoding="utf-8")
    with pytest.raises(InputError, match=r"rows\.jsonl:2"):
        list(read_rows(path))


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(InputError, match="cannot be read"):
        list(read_rows(tmp_path / "none.jsonl"))
