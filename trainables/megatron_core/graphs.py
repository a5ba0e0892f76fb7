"""CUDA graphs: field names of each Megatron-Core version, and when graphs are captured."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

from trainables.errors import TrialSpecError

if TYPE_CHECKING:
    from trainables.megatron_core.model import TrainingState
    from trainables.megatron_core.plan import BuildPlan

FULL_ITERATION = "full_iteration"


def translate_cuda_graph_fields(
    fields: Mapping[str, Any], known: Collection[str]
) -> dict[str, Any]:
    """The CUDA-graph fields of `fields` in the spelling of the installed Megatron-Core.

    Versions 0.16 and 0.17 name what is captured `cuda_graph_scope` and treat the whole iteration
    as a scope of the `local` implementation; from 0.18 it is `cuda_graph_modules` and an
    implementation of its own (`TransformerConfig` of each version). Either spelling is accepted.
    `known` holds the field names of the installed `TransformerConfig`. Empty when `fields` asks
    for no graph.
    """
    implementation = fields.get("cuda_graph_impl") or "none"
    scope = fields.get("cuda_graph_modules")
    if scope is None:
        scope = fields.get("cuda_graph_scope")
    modules = _as_list(scope)
    if FULL_ITERATION in modules:
        implementation = FULL_ITERATION
        modules = [module for module in modules if module != FULL_ITERATION]
    if implementation == "none":
        return {}
    if implementation == FULL_ITERATION and modules:
        raise TrialSpecError(
            f"cuda_graph_impl='full_iteration' captures everything; remove {modules} from "
            "cuda_graph_modules"
        )
    if "cuda_graph_modules" in known:
        return {"cuda_graph_impl": implementation, "cuda_graph_modules": modules}
    if implementation == FULL_ITERATION:
        return {"cuda_graph_impl": "local", "cuda_graph_scope": [FULL_ITERATION]}
    return {"cuda_graph_impl": implementation, "cuda_graph_scope": modules}


def _as_list(scope: object) -> list[str]:
    if scope is None:
        return []
    names = scope.split(",") if isinstance(scope, str) else list(scope)  # type: ignore[call-overload]
    # "full" is the old spelling of an empty scope: the whole layer.
    return [str(name) for name in names if name and name != "full"]


def steps_until_captured(transformer: Mapping[str, Any]) -> int:
    """Steps after which no more graph is captured, for `TransformerConfig` arguments.

    0 without graphs. Graphs are captured after `cuda_graph_warmup_steps` eager steps (3 unless
    set); the replay after that may still allocate.
    """
    if transformer.get("cuda_graph_impl", "none") == "none":
        return 0
    return int(transformer.get("cuda_graph_warmup_steps", 3)) + 2


def captures_full_iteration(config: Any) -> bool:
    """Whether a `TransformerConfig` asks for one graph of the whole iteration."""
    scope = getattr(config, "cuda_graph_scope", None) or []
    names = {getattr(part, "name", part) for part in scope}
    return config.cuda_graph_impl == FULL_ITERATION or FULL_ITERATION in names


def graphed_schedule(schedule: Callable[..., Any], config: Any) -> Callable[..., Any]:
    """`schedule`, replayed from one graph after its warm-up if `config` asks for that."""
    if not captures_full_iteration(config):
        return schedule
    from megatron.core.full_cuda_graph import FullCudaGraphWrapper

    wrapped: Callable[..., Any] = FullCudaGraphWrapper(
        schedule, cuda_graph_warmup_steps=config.cuda_graph_warmup_steps
    )
    return wrapped


class LayerGraphs:
    """Per-layer graphs of Transformer Engine, captured between two steps.

    Megatron-Core's `local` graphs need no help: the schedules capture them. This follows the
    training loop of Megatron-LM (megatron/training/training.py, `train`).
    """

    def __init__(self, plan: BuildPlan, state: TrainingState) -> None:
        self._helper: Any = None
        self._chunks: list[Any] = state.chunks
        self._warmup_steps: int = state.config.cuda_graph_warmup_steps
        ddp_config: Any = self._chunks[0].ddp_config
        self._gathers_in_hooks = (
            ddp_config.use_distributed_optimizer and ddp_config.overlap_param_gather
        )
        if state.config.cuda_graph_impl == "transformer_engine":
            from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator
            from megatron.core.transformer.cuda_graphs import TECudaGraphHelper

            layout = plan.layout
            init_num_microbatches_calculator(  # the helper asks it what to capture
                rank=0,
                rampup_batch_size=None,
                global_batch_size=layout.num_microbatches
                * layout.micro_batch_size
                * layout.data_parallel_size,
                micro_batch_size=layout.micro_batch_size,
                data_parallel_size=layout.data_parallel_size,
            )
            self._helper = TECudaGraphHelper(
                model=self._chunks,
                config=state.config,
                seq_length=plan.seq_length,
                micro_batch_size=plan.layout.micro_batch_size,
                optimizers=[state.optimizer],
            )

    def before_step(self, steps_done: int) -> None:
        """Capture once the warm-up steps are done. Call before every step."""
        if self._helper is None or steps_done != self._warmup_steps:
            return
        # Parameter all-gathers hook into forward; they must not be captured.
        if self._gathers_in_hooks and steps_done > 0:
            for chunk in self._chunks:
                chunk.disable_forward_pre_hook(param_sync=False)
        self._helper.create_cudagraphs()
        if self._gathers_in_hooks and steps_done > 0:
            for chunk in self._chunks:
                chunk.enable_forward_pre_hook()
            self._helper.cuda_graph_set_manual_hooks()
