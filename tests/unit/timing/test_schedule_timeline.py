"""The Chrome trace of a predicted step."""

from __future__ import annotations

import itertools
import json
from collections import Counter, defaultdict

import numpy as np
import pytest

from tuner.timing.calibration import Calibration, starting_rates
from tuner.timing.closed_form import pipeline_times
from tuner.timing.observations import timed_case
from tuner.timing.predicted import predicted_trace
from tuner.timing.schedule import Pipeline, simulate
from tuner.timing.step import step_times
from tuner.timing.tail import StepTail, finish_step
from tuner.timing.timeline import trace_document


@pytest.fixture(scope="module")
def document():
    pipeline = Pipeline(4, 8, 2, overlap_p2p=True)
    rng = np.random.default_rng(3)
    forward, backward = rng.uniform(1, 2, (4, 2)), rng.uniform(2, 3, (4, 2))
    step = simulate(pipeline, forward, backward, 0.05)
    times = pipeline_times(pipeline, forward[None], backward[None], 0.05)
    tail = StepTail(np.full((1, 4, 2), 0.3), np.full((1, 4), 0.2), np.full((1, 4), 0.1))
    end = finish_step(times, backward[None], tail)
    made = trace_document(pipeline, step, 0.05, recompute_s=np.full((4, 2), 0.5), end=end)
    return json.loads(json.dumps(made)), step, end


def test_events_are_complete_and_named(document):
    trace, _, _ = document
    for event in trace["traceEvents"]:
        assert event["ph"] in ("X", "M")
        assert {"name", "pid", "tid"} <= event.keys()
        if event["ph"] == "X":
            assert event["ts"] >= 0
            assert event["dur"] > 0
    names = {
        (e["pid"], e["args"]["name"])
        for e in trace["traceEvents"]
        if e["ph"] == "M" and e["name"] == "process_name"
    }
    assert names == {(stage, f"pipeline stage {stage}") for stage in range(4)}


def test_bars_of_a_thread_do_not_overlap(document):
    trace, _, _ = document
    threads = defaultdict(list)
    for event in trace["traceEvents"]:
        if event["ph"] == "X" and event["cat"] != "pipeline transfers":
            threads[event["pid"], event["tid"]].append(event)
    assert len(threads) == 8
    for events in threads.values():
        events.sort(key=lambda event: event["ts"])
        for before, after in itertools.pairwise(events):
            assert before["ts"] + before["dur"] <= after["ts"] + 0.01


def test_all_of_a_step_is_there_and_ends_with_it(document):
    trace, _, end = document
    bars = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    counts = defaultdict(int)
    for event in bars:
        counts[event["name"].split()[0]] += 1
    assert counts["forward"] == counts["backward"] == counts["recompute"] == 4 * 8 * 2
    # Each pass but those of the last and the first virtual stage hands its result on.
    assert counts["send"] == 2 * 8 * (4 * 2 - 1)
    assert counts["optimizer"] == 4
    last = max(event["ts"] + event["dur"] for event in bars)
    assert last == pytest.approx(end.step_s[0] * 1e6, rel=1e-6)


def test_a_configuration_becomes_a_trace_of_its_predicted_step():
    document = {
        "model": "tiny-gqa",
        "config": {
            "pipeline_model_parallel_size": 2,
            "tensor_model_parallel_size": 2,
            "micro_batch_size": 1,
            "recompute_granularity": "selective",
            "recompute_modules": ["mlp"],
        },
        "world_size": 4,
        "seq_length": 256,
        "global_batch_size": 4,
        "gpu": "h100",
    }
    prior = Calibration.prior("H100-SXM-80GB", "bf16", starting_rates())
    trace = predicted_trace(document, prior)
    bars = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    counts = Counter(event["name"].split()[0] for event in bars)
    assert counts["forward"] == counts["backward"] == counts["recompute"] == 2 * 4
    case = timed_case(document, prior)
    table = case.table(prior.rates)
    rows = case.rows(table)
    times = step_times([case.candidate], [rows[0]], [rows[1]], table, global_batch_size=4)
    last = max(event["ts"] + event["dur"] for event in bars) * 1e-6
    assert last == pytest.approx(times.step_s[0] - prior.rates.step_s, rel=1e-4)
