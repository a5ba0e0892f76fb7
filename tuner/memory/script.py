"""The training script around Megatron-Core: its own settings, its batches and its loss.

Batches and loss are those of Megatron-LM's `pretrain_gpt.py` (`get_batch_on_this_tp_rank`,
`loss_func`): the first and last pipeline stages hold the batch on the device while they compute.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from trainables.megatron_core.cpu_device import replaced
from trainables.megatron_core.graphs import LayerGraphs, graphed_schedule
from trainables.megatron_core.schedule import unwrapped
from tuner.errors import InputError
from tuner.memory import graphs
from tuner.memory.errors import UnsupportedError

if TYPE_CHECKING:
    import torch

ATTENTION_MASK = "create_attention_mask_in_dataloader"

_RENAMED = {"ddp_average_in_collective": "average_in_collective"}
"""Settings of training scripts that Megatron-Core's classes know under another name."""

_WEIGHTS_IN_FP8 = ("fp8_param", "fp8_param_gather")
"""Names of one option of training scripts, for the model's layers and for data parallelism."""

_OF_THE_LOOP = ("check_for_nan_in_loss",)
"""Settings of training loops that no class of Megatron-Core has and that hold no memory."""

_UNMODELLED = dict.fromkeys(
    ("fp4_param", "fp4_param_gather"), "weights held in FP4 are not modelled"
)


def megatron_core_config(config: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
    """A flat configuration in Megatron-Core's names, and whether batches hold attention masks.

    Raises UnsupportedError for settings the dry run does not cover.
    """
    fields = {
        _RENAMED.get(name, name): value
        for name, value in config.items()
        if name not in _OF_THE_LOOP
    }
    for name, message in _UNMODELLED.items():
        if fields.get(name):
            raise UnsupportedError(message, field=name, fix="unset it")
        fields.pop(name, None)
    if any(fields.get(name) for name in _WEIGHTS_IN_FP8):
        fields |= dict.fromkeys(_WEIGHTS_IN_FP8, True)
    if graphs.uses_graphs(fields):
        fields = graphs.with_early_capture(fields)
    return fields, bool(fields.pop(ATTENTION_MASK, False))


def _check_recomputed_bias(state: Any) -> None:
    """A checkpoint that returns a parameter makes itself that parameter's gradient function.

    Its backward pass then enters it again without end. With `add_bias_linear` a recomputed MLP
    returns its output's bias (transformer/transformer_layer.py `_forward_mlp`).
    """
    config = state.config
    modules = config.recompute_modules or ()
    if config.recompute_granularity != "selective" or "mlp" not in modules:
        return
    for chunk in state.chunks:
        for layer in unwrapped(chunk).decoder.layers:
            last = getattr(getattr(layer, "mlp", None), "linear_fc2", None)
            if config.add_bias_linear and last is not None:
                raise InputError(
                    "recomputing mlp with add_bias_linear never ends: the checkpoint returns the "
                    "bias itself and its backward pass enters it again",
                    field="recompute_modules",
                    fix="leave mlp out, or use full recompute",
                )


def _check_uniform_recompute(state: Any) -> None:
    """Megatron-Core 0.16 runs past the last layer where chunks hold no whole number of groups.

    Later versions end the last group early (transformer/transformer_block.py
    `_checkpointed_forward`).
    """
    import megatron.core

    config = state.config
    if config.recompute_granularity != "full" or config.recompute_method != "uniform":
        return
    if not megatron.core.__version__.startswith("0.16"):
        return
    for chunk in state.chunks:
        layers = len(unwrapped(chunk).decoder.layers)
        if layers % config.recompute_num_layers:
            raise InputError(
                f"{config.recompute_num_layers} does not divide the {layers} layers of a model "
                "chunk, as uniform recompute needs in Megatron-Core 0.16",
                field="recompute_num_layers",
                fix="set it to a divisor, or recompute_method to block",
            )


@contextmanager
def layers_as_specified() -> Iterator[None]:
    """Keep Megatron-Core's own layers; real runs of this package swap some for leaner ones."""
    from trainables.megatron_core import model

    with replaced(model, with_memory_lean_layers=lambda spec: spec):
        yield


@contextmanager
def sinkhorn_converges() -> Iterator[None]:
    """transformer/moe/moe_utils.py `sinkhorn` iterates until its values stand still: once here.

    Each iteration allocates what the first does.
    """
    from megatron.core.transformer.moe import router

    iterate = router.sinkhorn

    def sinkhorn(cost: torch.Tensor, *options: Any, **more: Any) -> Any:
        import torch

        with replaced(torch.Tensor, __bool__=lambda self: False):  # "not yet" is over
            return iterate(cost, *options, **more)

    with replaced(router, sinkhorn=sinkhorn):
        yield


class ScriptStep:
    """One optimizer step of a rank, as `TrainingStep` but with a training script's batches."""

    def __init__(self, plan: Any, state: Any, attention_mask: bool) -> None:
        from megatron.core.pipeline_parallel import get_forward_backward_func

        self._plan, self._state = plan, state
        self._attention_mask = attention_mask
        self._forward_backward = graphed_schedule(get_forward_backward_func(), state.config)
        self._layer_graphs = LayerGraphs(plan, state)
        self._steps_done = 0
        _check_uniform_recompute(state)
        _check_recomputed_bias(state)

    def __call__(self, index: int) -> None:
        state, layout = self._state, self._plan.layout
        self._layer_graphs.before_step(self._steps_done)
        self._steps_done += 1
        for chunk in state.chunks:
            chunk.zero_grad_buffer()
        state.optimizer.zero_grad()
        self._forward_backward(
            forward_step_func=_forward_step,
            data_iterator=[self._batches(unwrapped(chunk)) for chunk in state.chunks],
            model=state.chunks,
            num_microbatches=layout.num_microbatches,
            seq_length=self._plan.seq_length,
            micro_batch_size=layout.micro_batch_size,
            forward_only=False,
        )
        state.optimizer.step()

    def _batches(self, model: Any) -> Iterator[dict[str, torch.Tensor]] | None:
        """This rank's micro-batches for one model chunk; None where it reads nothing."""
        first = model.pre_process or getattr(model, "mtp_process", False)
        last = model.post_process
        if not (first or last):
            return None
        return self._made_batches(first, last)

    def _made_batches(self, first: bool, last: bool) -> Iterator[dict[str, torch.Tensor]]:
        for _ in range(self._plan.layout.num_microbatches):
            yield self._batch(first, last)  # not named here: a generator keeps its variables

    def _batch(self, first: bool, last: bool) -> dict[str, torch.Tensor]:
        import torch

        size, length = self._plan.layout.micro_batch_size, self._plan.seq_length
        batch: dict[str, torch.Tensor] = {}
        if first:
            for name in ("tokens", "position_ids"):
                batch[name] = torch.empty(size, length, dtype=torch.int64, device="cuda")
        if last:
            batch["labels"] = torch.empty(size, length, dtype=torch.int64, device="cuda")
            batch["loss_mask"] = torch.empty(size, length, dtype=torch.float32, device="cuda")
        if self._attention_mask:
            shape = (size, 1, length, length)
            batch["attention_mask"] = torch.empty(shape, dtype=torch.bool, device="cuda")
        return batch


def _forward_step(data: Any, model: Any, return_schedule_plan: bool = False) -> Any:
    """The forward pass of one micro-batch, or its plan where the schedule interleaves layers."""
    # The split changes its argument, which may be the static input of a captured step.
    batch = _part_of_this_cp_rank(dict(next(data))) if data is not None else {}
    bare = unwrapped(model)
    run = bare.build_schedule_plan if return_schedule_plan else model
    more = {"loss_mask": batch.get("loss_mask")} if _takes(type(bare).forward, "loss_mask") else {}
    output = run(
        batch.get("tokens"),
        batch.get("position_ids"),
        batch.get("attention_mask"),
        labels=batch.get("labels"),
        **more,
    )
    return output, partial(_loss, batch.get("loss_mask"))


@cache
def _takes(function: Any, argument: str) -> bool:
    """Whether a function has an argument: models of hybrid layers know no loss mask at first."""
    return argument in inspect.signature(function).parameters


def _part_of_this_cp_rank(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    from megatron.core import parallel_state, utils

    group = parallel_state.get_context_parallel_group()
    split: Any = getattr(utils, "get_pretrain_batch_on_this_cp_rank", None)  # 0.18 alone
    options: dict[str, Any] = {"cp_group": group}
    if split is None:
        split = utils.get_batch_on_this_cp_rank
        known = inspect.signature(split).parameters
        options |= {"is_hybrid_cp": False}
        options = {name: value for name, value in options.items() if name in known}
    part: dict[str, torch.Tensor] = split(batch, **options)
    return part


def _loss(loss_mask: Any, output: torch.Tensor) -> Any:
    import torch

    losses = output.view(-1).float()
    mask = loss_mask.view(-1).float()
    loss = torch.sum(losses * mask)
    tokens = mask.sum().clone().detach().to(torch.int)
    report = torch.cat([loss.clone().detach().view(1), tokens.view(1)])
    return loss, tokens, {"lm loss": report}
