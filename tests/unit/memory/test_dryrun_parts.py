"""Parts of the dry run that need neither PyTorch nor Megatron-Core."""

from __future__ import annotations

import numpy as np
import pytest

from tuner.memory.categories import ACTIVATIONS, FORWARD_TRANSIENTS, breakdown_at, categorised
from tuner.memory.errors import UnsupportedError
from tuner.memory.script import megatron_core_config
from tuner.memory.trace import MODEL_BUILT, Trace


def trace_of(events, phases=("build", "forward", "backward")) -> Trace:
    """A trace of (block, bytes, phase) events, with the build ending before the first event."""
    block, size, phase = zip(*events, strict=True)
    zeros = np.zeros(len(events), dtype=np.int32)
    return Trace(
        block=np.array(block, dtype=np.int64),
        bytes=np.array(size, dtype=np.int64),
        module=zeros,
        phase=np.array([phases.index(name) for name in phase], dtype=np.int32),
        category=zeros,
        module_names=("layer",),
        phase_names=phases,
        category_names=("",),
        markers=((0, MODEL_BUILT),),
    )


def test_live_bytes_round_each_block_up() -> None:
    trace = trace_of([(0, 100, "forward"), (1, 513, "forward"), (0, -100, "backward")])
    assert trace.live_bytes(512).tolist() == [512, 1536, 1024]
    assert trace.alive_at(2).tolist() == [1]


def test_a_trace_survives_its_file(tmp_path) -> None:
    trace = trace_of([(0, 100, "forward"), (0, -100, "backward")])
    trace.save(tmp_path / "trace.npz")
    read = Trace.load(tmp_path / "trace.npz")
    assert read.markers == trace.markers
    assert read.phase_names == trace.phase_names
    np.testing.assert_array_equal(read.bytes, trace.bytes)


def test_what_outlives_its_forward_pass_is_an_activation() -> None:
    events = [
        (0, 10, "forward"),
        (1, 20, "forward"),
        (1, -20, "forward"),
        (0, -10, "backward"),
    ]
    trace = categorised(trace_of(events), {}, np.array([3]))
    assert breakdown_at(trace, 1) == {ACTIVATIONS: 10, FORWARD_TRANSIENTS: 20}


@pytest.mark.parametrize("field", ["fp4_param", "fp4_param_gather"])
def test_settings_without_a_model_are_refused_by_name(field) -> None:
    with pytest.raises(UnsupportedError, match=field):
        megatron_core_config({field: True})


def test_fp8_weights_go_by_the_names_of_layers_and_of_data_parallelism() -> None:
    config, _ = megatron_core_config({"fp8_param_gather": True})
    assert config == {"fp8_param": True, "fp8_param_gather": True}
