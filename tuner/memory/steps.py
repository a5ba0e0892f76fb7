"""Runs the training steps of one rank without data and records them.

For a process of its own: importing this module's functions' needs and running them leaves
Megatron-Core's global state behind.
"""

from __future__ import annotations

import gc
from contextlib import ExitStack
from typing import Any

from tuner.memory.request import LOCAL, DryRunRequest
from tuner.memory.trace import MODEL_BUILT, Trace, step_end, step_start


def record_steps(request: DryRunRequest) -> Trace:
    """Build the model, run `request.steps` optimizer steps and return what was allocated."""
    from trainables.megatron_core.cpu_device import without_compilation
    from trainables.megatron_core.plan import build_plan
    from tuner.memory import attribution, collectives, cublas, device, fusion, te
    from tuner.memory.recorder import Recorder
    from tuner.memory.values import KnownValues

    local = request.layers == LOCAL
    with ExitStack() as stack:
        stack.enter_context(collectives.collectives_finish_at_once())
        if not local:
            stack.enter_context(te.installed(request.te_version, request.architecture))
        # Megatron-Core compiles its functions as its modules are imported, now and during the run.
        stack.enter_context(without_compilation() if local else fusion.fusing())
        plan = build_plan(_trial(request), use_transformer_engine=not local)
        values = KnownValues(_routing_density(plan.transformer))
        recorder = Recorder(host_counts=local, handlers=device.handlers(), values=values)
        if not local:
            backward = frozenset(map(recorder.phase_code, attribution.BACKWARD_PHASES))
            size = cublas.workspace_bytes(request.environment, request.architecture)
            recorder.handlers.update(cublas.workspace_handlers(size, backward))
        stack.enter_context(device.device_without_data(recorder, request.architecture))
        stack.enter_context(collectives.lonely_rank(request.rank, request.world_size))
        watch = attribution.Attribution(recorder)
        stack.enter_context(_no_garbage_collection())
        stack.enter_context(recorder.recording())
        _run(request, plan, recorder, watch)
        return recorder.trace()


def _run(request: DryRunRequest, plan: Any, recorder: Any, watch: Any) -> None:
    from trainables.megatron_core.model import build_training_state
    from trainables.megatron_core.processes import initialize_parallel_state
    from trainables.megatron_core.schedule import TrainingStep
    from tuner.memory.attribution import BUILD, OPTIMIZER, STEP

    with recorder.in_phase(BUILD):
        initialize_parallel_state(plan, timeout_s=600.0)
        state = build_training_state(plan, initialize=False)
    watch.name_modules(state.chunks)
    recorder.mark(MODEL_BUILT)
    step = TrainingStep(plan, state)
    _file_under(recorder, OPTIMIZER, state.optimizer)
    with watch.active(), recorder.in_phase(STEP):
        for number in range(1, request.steps + 1):
            gc.collect()
            recorder.mark(step_start(number))
            step(number)
            recorder.mark(step_end(number))


def _file_under(recorder: Any, phase: str, optimizer: Any) -> None:
    original = optimizer.step

    def step(*args: Any, **kwargs: Any) -> Any:
        with recorder.in_phase(phase):
            return original(*args, **kwargs)

    optimizer.step = step


def _trial(request: DryRunRequest) -> Any:
    from tuner.measurement import TrialSpec

    return TrialSpec(
        model=dict(request.model),
        config=dict(request.config),
        world_size=request.world_size,
        seq_length=request.seq_length,
        global_batch_size=request.global_batch_size,
        device="cpu" if request.layers == LOCAL else "cuda",
        precision=request.precision,
    )


def _routing_density(transformer: Any) -> float | None:
    experts = transformer.get("num_moe_experts")
    return transformer.get("moe_router_topk", 2) / experts if experts else None


class _no_garbage_collection:  # noqa: N801 - reads as a context
    """Collections between steps only, so that frees come at the same place in every process."""

    def __enter__(self) -> None:
        gc.disable()

    def __exit__(self, *exception: object) -> None:
        gc.enable()
