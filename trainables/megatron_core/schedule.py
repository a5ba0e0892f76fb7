"""One training step: Megatron-Core's pipeline schedule and optimizer over mock data."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from trainables.megatron_core.data import microbatches
from trainables.megatron_core.graphs import LayerGraphs, graphed_schedule
from trainables.megatron_core.hashing import stream_id

if TYPE_CHECKING:
    import torch

    from trainables.megatron_core.model import TrainingState
    from trainables.megatron_core.plan import BuildPlan


class TrainingStep:
    """Runs complete optimizer steps of a `TrainingState`; calling it runs the next one."""

    def __init__(self, plan: BuildPlan, state: TrainingState) -> None:
        from megatron.core.pipeline_parallel import get_forward_backward_func

        self._plan = plan
        self._state = state
        self._forward_backward = graphed_schedule(get_forward_backward_func(), state.config)
        self._layer_graphs = LayerGraphs(plan, state)
        self._steps_done = 0

    def __call__(self, index: int) -> torch.Tensor:
        """Run step `index` (it selects the data) and return this rank's share of its loss.

        The share is a float64 scalar: the sum of the losses of the tokens this rank computed, 0 on
        ranks without the last pipeline stage. Adding the shares of all ranks that hold distinct
        tokens gives the loss of the global batch.
        """
        import torch

        state = self._state
        self._layer_graphs.before_step(self._steps_done)
        self._steps_done += 1
        for chunk in state.chunks:
            chunk.zero_grad_buffer()  # type: ignore[operator]
        state.optimizer.zero_grad()
        outputs = self._forward_backward(
            forward_step_func=forward_step,
            data_iterator=self._data(index),
            model=state.chunks,
            num_microbatches=self._plan.layout.num_microbatches,
            seq_length=self._plan.seq_length,
            micro_batch_size=self._plan.layout.micro_batch_size,
            forward_only=False,
        )
        state.optimizer.step()
        # A graph's outputs are overwritten by the next replay; the sum is a tensor of its own.
        if not outputs:
            return torch.zeros((), dtype=torch.float64)
        return torch.stack([output["loss_sum"] for output in outputs]).double().sum()

    def _data(self, index: int) -> list[Iterator[dict[str, torch.Tensor]] | None]:
        """One iterator per model chunk; None where a chunk reads neither tokens nor labels."""
        import torch
        from megatron.core import parallel_state

        stream = stream_id("data", self._plan.seed, index)
        rank = parallel_state.get_data_parallel_rank()
        device = torch.device(torch.cuda.current_device())
        return [
            microbatches(
                self._plan.layout,
                rank,
                self._plan.seq_length,
                self._plan.vocab_size,
                stream,
                device,
            )
            if _reads_data(unwrapped(chunk))
            else None
            for chunk in self._state.chunks
        ]


def forward_step(data: Iterator[dict[str, torch.Tensor]] | None, model: Any) -> Any:
    """Forward one micro-batch through one model chunk, as the schedules call it.

    Returns the chunk's output and the function that makes a loss of it.
    """
    if data is None:
        return model(None, None, None, labels=None), token_loss
    batch = next(data)
    labels = batch["labels"] if unwrapped(model).post_process else None
    return model(batch["tokens"], batch["position_ids"], None, labels=labels), token_loss


def token_loss(losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """Loss sum, token count and report of one micro-batch, from per-token losses `[b, s]`."""
    import torch

    total = losses.float().sum()
    # A fill, unlike a copy from the host, may be captured in a CUDA graph.
    tokens = torch.full((), losses.numel(), dtype=torch.int, device=losses.device)
    return total, tokens, {"loss_sum": total.detach().clone()}


def unwrapped(model: Any) -> Any:
    """The `GPTModel` inside data-parallel and precision wrappers."""
    while hasattr(model, "module"):
        model = model.module
    return model


def _reads_data(model: Any) -> bool:
    return bool(model.pre_process or model.post_process or getattr(model, "mtp_process", False))
