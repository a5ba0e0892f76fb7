"""The estimate document, from traces given in place of a dry run."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tuner.errors import InputError
from tuner.estimation import EstimateRequest, estimate, peak_ranks, run_batch_size
from tuner.memory.trace import Trace, step_end, step_start

MIB, GIB = 1 << 20, 1 << 30
DOCUMENT = {
    "model": "llama3-8b",
    "world_size": 16,
    "seq_length": 8192,
    "global_batch_size": 128,
    "gpu": "h100",
    "config": {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 4},
}


def small_trace(peak: int = 40 * GIB) -> Trace:
    """Weights stay, activations come and go within one step."""
    events = [(0, 10 * GIB, 0), (1, peak - 10 * GIB, 1), (1, 10 * GIB - peak, 1)]
    blocks, sizes, categories = (np.array(column) for column in zip(*events, strict=True))
    names = np.zeros(len(events), dtype=np.int32)
    return Trace(
        block=blocks.astype(np.int64),
        bytes=sizes.astype(np.int64),
        module=names,
        phase=names,
        category=categories.astype(np.int32),
        module_names=("",),
        phase_names=("",),
        category_names=("weights", "activations"),
        markers=((1, step_start(1)), (3, step_end(1))),
    )


def estimated(peak: int = 40 * GIB, **changes) -> dict:
    trace = small_trace(peak)
    return estimate(DOCUMENT | changes, ranks=[0], trace_of=lambda request, rank: trace)


def test_the_document_is_json_and_holds_the_agreed_fields():
    document = json.loads(json.dumps(estimated()))
    for name in ("fits", "peak_allocated_bytes", "peak_reserved_bytes", "ranks", "step_time_s"):
        assert name in document
    assert sum(
        seconds for cause, seconds in document["time_breakdown"].items() if cause != "uncertainty"
    ) == pytest.approx(document["step_time_s"])
    assert 0.0 < document["mfu"] < 1.0
    rank = document["ranks"][0]
    assert {"rank", "stage", "allocated_bytes", "breakdown"} <= set(rank)


def test_peak_static_and_breakdown_agree_with_the_trace():
    rank = estimated()["ranks"][0]
    assert rank["allocated_bytes"] == 40 * GIB
    assert rank["static_bytes"] == 10 * GIB
    assert rank["breakdown"] == {"activations": 30 * GIB, "weights": 10 * GIB}


@pytest.mark.parametrize(("peak", "fits"), [(70 * GIB, True), (79 * GIB, False)])
def test_what_lies_outside_the_allocator_counts_against_the_device(peak, fits):
    document = estimated(peak)
    assert document["fits"] is fits
    assert document["memory_fit"]["cause"] == (None if fits else "capacity")


def test_the_timeline_keeps_the_peak():
    line = estimated()["ranks"][0]["timeline"]
    assert max(line["allocated_bytes"]) == estimated()["peak_allocated_bytes"]
    assert len(line["event"]) == len(line["reserved_bytes"])
    assert line["markers"][-1][1] == step_end(1)


class TestRequest:
    def test_architecture_and_run_shape_in_the_config_win(self):
        config = {"num_layers": 4, "seq_length": 1024, "micro_batch_size": 2}
        request = EstimateRequest.from_document(DOCUMENT | {"config": config})
        assert request.model.num_layers == 4
        assert request.seq_length == 1024
        assert request.candidate.micro_batch_size == 2
        assert request.candidate.extra == ()

    @pytest.mark.parametrize(
        ("changes", "field"),
        [
            ({"gpu": None}, "gpu"),
            ({"gpu": "h1000x"}, "gpu"),
            ({"world_size": 0}, "world_size"),
            ({"seq_length": None}, "seq_length"),
            ({"model": None}, "model"),
            ({"model": "llama9"}, "llama9"),
            ({"model": 3}, "model"),
            ({"config": None}, "config"),
            ({"precision": "int8"}, "precision"),
        ],
    )
    def test_unusable_input_names_the_field(self, changes, field):
        with pytest.raises(InputError, match=field):
            EstimateRequest.from_document(DOCUMENT | changes)


class TestPeakRanks:
    def ranks(self, config: dict, **changes) -> list[int]:
        return peak_ranks(EstimateRequest.from_document(DOCUMENT | changes | {"config": config}))

    def test_without_pipeline_the_last_rank_stands_for_all(self):
        assert self.ranks({}) == [15]

    def test_first_second_and_last_stage_of_an_even_pipeline(self):
        assert self.ranks({"pipeline_model_parallel_size": 4}) == [0, 4, 15]

    def test_every_stage_of_an_uneven_pipeline(self):
        config = {"pipeline_model_parallel_size": 4, "num_layers": 30}
        assert self.ranks(config) == [0, 4, 8, 15]

    def test_ranks_of_a_stage_differ_where_a_part_of_the_optimizer_is_on_the_host(self):
        config = {"optimizer_cpu_offload": True, "pipeline_model_parallel_size": 2}
        assert self.ranks(config | {"optimizer_offload_fraction": 0.5}) == [0, 8, 12, 15]
        assert self.ranks(config | {"optimizer_offload_fraction": 1.0}) == [0, 15]


class TestRunBatch:
    def size(self, batch: int, config: dict) -> int:
        document = DOCUMENT | {"global_batch_size": batch, "config": config}
        return run_batch_size(EstimateRequest.from_document(document))

    def test_small_batches_run_whole(self):
        assert self.size(16, {"pipeline_model_parallel_size": 4}) == 16

    def test_large_batches_fill_the_pipeline_and_run_four_micro_batches_more(self):
        # 16 GPUs, 4 stages: 4 replicas of 2 sequences, 8 micro-batches each.
        config = {"pipeline_model_parallel_size": 4, "micro_batch_size": 2}
        assert self.size(1024, config) == 4 * 2 * 8

    @pytest.mark.parametrize(
        ("chunks", "rounds"),
        [
            ({"virtual_pipeline_model_parallel_size": 2}, 12),
            ({"pipeline_model_parallel_layout": "Et|(tt|)*6tL"}, 12),
            ({"pipeline_model_parallel_layout": "Et*5|(t*5|)*2t*5L"}, 8),
        ],
    )
    def test_interleaved_schedules_run_three_rounds_of_the_pipeline(self, chunks, rounds):
        config = {"pipeline_model_parallel_size": 4, "micro_batch_size": 1, **chunks}
        assert self.size(1024, config) == 4 * rounds

    @pytest.mark.parametrize(("limit", "rounds"), [(22, 28), (6, 12), (0, 256)])
    def test_interleaved_schedules_run_whole_rounds_where_gradients_are_deferred(
        self, limit, rounds
    ):
        config = {
            "pipeline_model_parallel_size": 4,
            "virtual_pipeline_model_parallel_size": 2,
            "micro_batch_size": 1,
            "defer_embedding_wgrad_compute": True,
            "wgrad_deferral_limit": limit,
        }
        assert self.size(1024, config) == 4 * rounds

    def test_without_a_pipeline_four_micro_batches_run(self):
        assert self.size(1024, {}) == 16 * 4
