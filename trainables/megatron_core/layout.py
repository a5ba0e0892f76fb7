"""How a trial's processes and its batch are divided: the parallel part of a candidate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trainables.errors import TrialSpecError


@dataclass(frozen=True, slots=True)
class Layout:
    """Parallel sizes and micro-batches of one run; every size is a count of ranks.

    `virtual_pipeline_model_parallel_size` is None for one model chunk per pipeline rank, as in
    Megatron-Core. `micro_batch_size` is in sequences.
    """

    world_size: int
    tensor_model_parallel_size: int
    pipeline_model_parallel_size: int
    virtual_pipeline_model_parallel_size: int | None
    context_parallel_size: int
    expert_model_parallel_size: int
    expert_tensor_parallel_size: int
    micro_batch_size: int
    num_microbatches: int

    @property
    def data_parallel_size(self) -> int:
        """Ranks that hold the same part of the dense model and see different sequences."""
        return self.world_size // (
            self.tensor_model_parallel_size
            * self.pipeline_model_parallel_size
            * self.context_parallel_size
        )

    @property
    def num_model_chunks(self) -> int:
        """Model chunks per pipeline rank."""
        return self.virtual_pipeline_model_parallel_size or 1

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any], world_size: int, global_batch_size: int
    ) -> Layout:
        """The layout of a flat candidate; absent sizes are 1.

        Raises `TrialSpecError` when the world size or the global batch is not a multiple of what
        the candidate needs.
        """

        def size(field: str, default: int = 1) -> int:
            value = config.get(field)
            return default if value is None else int(value)

        tensor = size("tensor_model_parallel_size")
        pipeline = size("pipeline_model_parallel_size")
        context = size("context_parallel_size")
        micro_batch = size("micro_batch_size")
        # A virtual size of 1 is one chunk per rank: the plain 1F1B schedule.
        virtual = _chunks_of_layout(config.get("pipeline_model_parallel_layout"), pipeline)
        virtual = virtual or size("virtual_pipeline_model_parallel_size")
        model_ranks = tensor * pipeline * context
        if world_size % model_ranks:
            raise TrialSpecError(
                f"world_size={world_size} is not a multiple of tensor_model_parallel_size * "
                f"pipeline_model_parallel_size * context_parallel_size = {model_ranks}; "
                "lower one of the sizes"
            )
        per_microbatch = micro_batch * (world_size // model_ranks)
        if global_batch_size % per_microbatch:
            raise TrialSpecError(
                f"global_batch_size={global_batch_size} is not a multiple of micro_batch_size * "
                f"data_parallel_size = {per_microbatch}; change micro_batch_size"
            )
        return cls(
            world_size=world_size,
            tensor_model_parallel_size=tensor,
            pipeline_model_parallel_size=pipeline,
            virtual_pipeline_model_parallel_size=virtual if virtual > 1 else None,
            context_parallel_size=context,
            expert_model_parallel_size=size("expert_model_parallel_size"),
            expert_tensor_parallel_size=size("expert_tensor_parallel_size", tensor),
            micro_batch_size=micro_batch,
            num_microbatches=global_batch_size // per_microbatch,
        )


def _chunks_of_layout(layout: object, pipeline: int) -> int:
    """Model chunks per pipeline rank that a pipeline layout deals out; 0 without one.

    Megatron-LM sets the virtual size from the layout (megatron/training/arguments.py).
    """
    if not layout:
        return 0
    if isinstance(layout, str):
        from megatron.core.transformer.pipeline_parallel_layer_layout import (
            PipelineParallelLayerLayout,
        )

        return int(PipelineParallelLayerLayout.get_num_stages_from_str(layout)) // pipeline
    return len(layout) // pipeline if isinstance(layout, (list, tuple)) else 0
