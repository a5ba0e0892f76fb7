"""Runs the training steps of one rank without data and records them.

For a process of its own: Megatron-Core is imported in surroundings that only a dry run wants, and
its global state is left behind.
"""

from __future__ import annotations

import gc
import importlib
import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from tuner.memory.request import LOCAL, DryRunRequest
from tuner.memory.trace import MODEL_BUILT, Trace, step_end, step_start


@contextmanager
def framework(layers: str, te_version: str, architecture: str) -> Iterator[None]:
    """Surroundings in which Megatron-Core may be imported for dry runs, and must stay."""
    from trainables.megatron_core.cpu_device import without_compilation
    from tuner.memory import collectives, fusion, kernels, te

    with ExitStack() as stack:
        stack.enter_context(collectives.collectives_finish_at_once())
        if layers == LOCAL:
            stack.enter_context(without_compilation())
        else:
            stack.enter_context(te.installed(te_version, architecture))
            stack.enter_context(kernels.triton_launches_nothing())
            stack.enter_context(fusion.fusing())
        yield


_NEEDED = (
    "torch._dynamo",
    "torch._refs.nn.functional",
    "torch.testing._internal.distributed.fake_pg",
    "megatron.core.distributed",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.optimizer",
    "megatron.core.optimizer.distrib_optimizer",
    "megatron.core.pipeline_parallel.schedules",
    "megatron.core.transformer.moe.moe_layer",
    "megatron.core.transformer.multi_latent_attention",
    "megatron.core.transformer.multi_token_prediction",
)


def preload(layers: str, architecture: str) -> None:
    """Import what every dry run needs, and hide it from the garbage collector. Needs `framework`.

    For a process that forks for each run: imports take several times as long as a small run.
    """
    from tuner.memory import device
    from tuner.memory.recorder import Recorder
    from tuner.memory.values import KnownValues

    recorder = Recorder(host_counts=layers == LOCAL, handlers={}, values=KnownValues(None))
    with device.device_without_data(recorder, architecture):
        for name in _NEEDED:
            importlib.import_module(name)
    gc.collect()
    gc.freeze()


def record_steps(request: DryRunRequest) -> tuple[Trace, dict[str, str]]:
    """`record_in_framework` in a fresh framework, for a process that makes one dry run."""
    with framework(request.layers, request.te_version, request.architecture):
        return record_in_framework(request)


def record_in_framework(request: DryRunRequest) -> tuple[Trace, dict[str, str]]:
    """Build the model and run `request.steps` optimizer steps.

    Gives what was allocated, categorised, and what the run took for granted. Needs `framework`.
    """
    from trainables.megatron_core.plan import build_plan
    from tuner.memory import attribution, collectives, cublas, device, fsdp, graphs, script
    from tuner.memory.recorder import Recorder
    from tuner.memory.te import deep_ep
    from tuner.memory.values import KnownValues

    local = request.layers == LOCAL
    with ExitStack() as stack:
        values = KnownValues(None)
        recorder = Recorder(host_counts=local, handlers=device.handlers(), values=values)
        stack.enter_context(device.device_without_data(recorder, request.architecture))
        config, attention_mask = script.megatron_core_config(request.config)
        own_layers = local or config.get("transformer_impl") == "local"
        plan = build_plan(_trial(request, config), use_transformer_engine=not own_layers)
        if not local:
            stack.enter_context(script.sinkhorn_converges())
            stack.enter_context(deep_ep.indices_become_maps())
            stack.enter_context(fsdp.sharding_runs(plan))
        if own_layers and not local:
            stack.enter_context(script.layers_as_specified())
        values.density = _routing_density(plan.transformer)
        if graphs.uses_graphs(plan.transformer):
            stack.enter_context(graphs.graphs_can_be_captured(recorder))
        if not local:
            backward = frozenset(map(recorder.phase_code, attribution.BACKWARD_PHASES))
            size = cublas.workspace_bytes(request.environment, request.architecture)
            recorder.handlers.update(cublas.workspace_handlers(size, backward))
        stack.enter_context(collectives.lonely_rank(request.rank, request.world_size))
        watch = attribution.Attribution(recorder)
        stack.enter_context(_collecting_garbage_between_steps())
        stack.enter_context(recorder.recording())
        labels, stated = _run(request, plan, recorder, watch, attention_mask)
        return watch.categorised(labels), _assumptions(request) | stated


def _run(
    request: DryRunRequest, plan: Any, recorder: Any, watch: Any, attention_mask: bool
) -> tuple[dict[int, str], dict[str, str]]:
    """Build and step; gives the category of blocks known by what they are, and what to state."""
    from trainables.megatron_core.model import build_training_state
    from trainables.megatron_core.processes import initialize_parallel_state
    from trainables.megatron_core.schedule import TrainingStep, unwrapped
    from tuner.memory import graphs
    from tuner.memory.attribution import BUILD, OPTIMIZER, STEP
    from tuner.memory.boundaries import (
        boundaries_marked,
        low_precision_weights,
        parameters_by_unit,
        placeholders_by_unit,
        shapes_by_unit,
    )
    from tuner.memory.script import ScriptStep
    from tuner.memory.te import userbuffers

    with recorder.in_phase(BUILD):
        initialize_parallel_state(plan, timeout_s=600.0)
        if plan.transformer.get("tp_comm_overlap"):
            userbuffers.initialize()
        state = build_training_state(plan, initialize=False)
    watch.name_modules(state.chunks)
    labels = watch.labels(state.chunks)
    recorder.mark(MODEL_BUILT)
    step: Any = ScriptStep(plan, state, attention_mask)
    if request.layers == LOCAL:
        step = TrainingStep(plan, state)
    _file_under(recorder, OPTIMIZER, state.optimizer)
    stated: dict[str, str] = {}
    model = unwrapped(state.chunks[0])
    with ExitStack() as stack:
        stack.enter_context(watch.active())
        stack.enter_context(recorder.in_phase(STEP))
        if request.boundaries:
            stack.enter_context(boundaries_marked(recorder, model))
        steps = max(request.steps, graphs.STEPS * graphs.uses_graphs(plan.transformer))
        for number in range(1, steps + 1):
            gc.collect()
            recorder.mark(step_start(number))
            step(number)
            recorder.mark(step_end(number))
    if request.boundaries:
        stated["parameters"] = json.dumps(parameters_by_unit(model))
        stated["shapes"] = json.dumps(shapes_by_unit(model))
        stated["placeholders"] = json.dumps(placeholders_by_unit(model))
        stated["low_precision_weights"] = json.dumps(low_precision_weights(model, recorder))
    return labels, stated


def _file_under(recorder: Any, phase: str, optimizer: Any) -> None:
    original = optimizer.step

    def step(*args: Any, **kwargs: Any) -> Any:
        with recorder.in_phase(phase):
            return original(*args, **kwargs)

    optimizer.step = step


def _trial(request: DryRunRequest, config: dict[str, Any]) -> Any:
    from tuner.measurement import TrialSpec

    return TrialSpec(
        model=dict(request.model),
        config=config,
        world_size=request.world_size,
        seq_length=request.seq_length,
        global_batch_size=request.global_batch_size,
        device="cpu" if request.layers == LOCAL else "cuda",
        precision=request.precision,
    )


def _routing_density(transformer: Any) -> float | None:
    experts = transformer.get("num_moe_experts")
    return transformer.get("moe_router_topk", 2) / experts if experts else None


def _assumptions(request: DryRunRequest) -> dict[str, str]:
    import megatron.core
    import torch

    stated = {"megatron_core": megatron.core.__version__, "torch": torch.__version__}
    if request.layers != LOCAL:
        stated |= {"transformer_engine": request.te_version, "gpu": request.architecture}
    if request.model.get("num_moe_experts"):
        stated["routing"] = "balanced: every expert receives the same number of tokens"
    return stated


@contextmanager
def _collecting_garbage_between_steps() -> Iterator[None]:
    """So that frees come at the same place in every process."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
