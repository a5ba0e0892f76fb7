"""Process groups of one rank: joining, Megatron-Core's parallel state, and leaving."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainables.megatron_core.plan import BuildPlan


@contextmanager
def joined_process_groups(plan: BuildPlan, timeout_s: float) -> Iterator[None]:
    """Join the job torchrun describes in the environment and set up Megatron's groups.

    Collectives that stall for `timeout_s` raise. The groups are destroyed on the way out, unless
    an exception is passing through: peers may be gone, and a graceful end would wait for them.
    """
    from datetime import timedelta

    import torch

    timeout = timedelta(seconds=timeout_s)
    if plan.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        torch.distributed.init_process_group("nccl", timeout=timeout, device_id=device)
    else:
        torch.distributed.init_process_group("gloo", timeout=timeout)
    initialize_parallel_state(plan, timeout_s)
    yield
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


def initialize_parallel_state(plan: BuildPlan, timeout_s: float) -> None:
    """Create Megatron-Core's process groups and seed its random states.

    Needs an initialised default process group, of any backend.
    """
    from megatron.core import parallel_state, tensor_parallel

    layout = plan.layout
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor_model_parallel_size,
        pipeline_model_parallel_size=layout.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=layout.virtual_pipeline_model_parallel_size,
        context_parallel_size=layout.context_parallel_size,
        expert_model_parallel_size=layout.expert_model_parallel_size,
        expert_tensor_parallel_size=layout.expert_tensor_parallel_size,
        num_distributed_optimizer_instances=plan.ddp.get("num_distributed_optimizer_instances", 1),
        hierarchical_context_parallel_sizes=plan.transformer.get(
            "hierarchical_context_parallel_sizes"
        ),
        distributed_timeout_minutes=max(1.0, timeout_s / 60.0),
        # Only checkpoints need the extra Gloo groups.
        create_gloo_process_groups=False,
    )
    graphs = plan.transformer.get("cuda_graph_impl", "none") != "none"
    tensor_parallel.model_parallel_cuda_manual_seed(
        plan.seed,
        te_rng_tracker=bool(plan.transformer.get("use_te_rng_tracker", False)),
        use_cudagraphable_rng=graphs,
    )
