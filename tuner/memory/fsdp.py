"""What Megatron-FSDP and PyTorch's FSDP2 ask of a device, answered for one without data.

Both run as they are: Megatron-Core's wrapper of Megatron-FSDP with its own buffers, and
`fully_shard` over a mesh of one dimension. Settings that fail in them upstream are refused.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch

from trainables.megatron_core.cpu_device import replaced
from trainables.megatron_core.wrapping import TORCH_FSDP2
from tuner.memory.categories import GATHERED
from tuner.memory.errors import UnsupportedError
from tuner.memory.te.state import filed_under

if TYPE_CHECKING:
    from trainables.megatron_core.plan import BuildPlan

_DEVICE = torch.device("cuda", 0)


class _Shim:
    """A module with some names replaced."""

    def __init__(self, original: Any, **names: Any) -> None:
        self._original = original
        vars(self).update(names)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


@contextmanager
def sharding_runs(plan: BuildPlan) -> Iterator[None]:
    """Let the wrapper that `plan` asks for run inside this context.

    Raises UnsupportedError for what Megatron-Core's wrappers cannot run.
    """
    with ExitStack() as stack:
        if plan.ddp.get("use_megatron_fsdp"):
            _check_megatron_fsdp(plan.ddp)
            stack.enter_context(_megatron_fsdp_runs())
        if plan.torch_fsdp2:
            _check_torch_fsdp2()
            stack.enter_context(_torch_fsdp2_runs())
        yield


def _check_megatron_fsdp(ddp: Mapping[str, Any]) -> None:
    if ddp.get("data_parallel_sharding_strategy", "no_shard") == "no_shard":
        raise UnsupportedError(
            "Megatron-FSDP that shards nothing has no buffer of weights to gather",
            field="data_parallel_sharding_strategy",
            fix="set optim, optim_grads or optim_grads_params, or unset use_megatron_fsdp",
        )
    if ddp.get("num_distributed_optimizer_instances", 1) > 1:
        raise UnsupportedError(
            "Megatron-FSDP over several optimizer instances is not modelled",
            field="num_distributed_optimizer_instances",
            fix="set it to 1",
        )


def _check_torch_fsdp2() -> None:
    """`finalize_model_grads` up to 0.18 hands the wrapper an argument it does not take."""
    import megatron.core
    from megatron.core.distributed import TorchFullyShardedDataParallel

    taken = inspect.signature(TorchFullyShardedDataParallel.finish_grad_sync).parameters
    if "force_all_reduce" not in taken:
        raise UnsupportedError(
            f"Megatron-Core {megatron.core.__version__} cannot finish a step with PyTorch's FSDP2",
            field=TORCH_FSDP2,
            fix="unset it, or use Megatron-Core 0.19 or later",
        )


@contextmanager
def _megatron_fsdp_runs() -> Iterator[None]:
    """Let `MegatronFSDP` find its device by number, and file the buckets it fetches, inside."""
    package = "megatron.core.distributed.fsdp.src.megatron_fsdp"
    by_number = _Shim(torch, cuda=_Shim(torch.cuda, current_device=lambda: 0))
    module = importlib.import_module(f"{package}.megatron_fsdp")
    buckets = importlib.import_module(f"{package}.param_and_grad_buffer")
    adapter = importlib.import_module("megatron.core.distributed.fsdp.mcore_fsdp_adapter")
    buffers, buffer = buckets.ParamAndGradBuffer, buckets.DataParallelBuffer
    make, fetch = buffers.__init__, buffer.fetch_bucket

    def make_with_data(self: Any, *args: Any, **kwargs: Any) -> None:
        """Parameters without data must not be taken for ones that are still to be made."""
        with replaced(torch.nn.Parameter, is_meta=property(lambda parameter: False)):
            make(self, *args, **kwargs)

    def fetch_filed(self: Any, *args: Any, **kwargs: Any) -> Any:
        with filed_under(GATHERED):
            return fetch(self, *args, **kwargs)

    with (
        replaced(module, torch=by_number),
        replaced(buffers, __init__=make_with_data),
        replaced(buffer, fetch_bucket=fetch_filed),
        # Random states come from the first rank of a group, and there are no peers.
        replaced(adapter, _load_rng_state_dict=lambda states: None),
        # Where each rank's part lies is asked of peers, for checkpoints alone.
        replaced(
            buckets,
            validate_uneven_dtensor=lambda tensor: None,
            update_uneven_dtensor_chunk_metadata=lambda tensor: None,
        ),
    ):
        yield


@contextmanager
def _torch_fsdp2_runs() -> Iterator[None]:
    """Let `fully_shard` find its device inside this context."""
    from torch.distributed.fsdp import _fully_shard as package

    names = ("_fsdp_collectives", "_fsdp_init", "_fsdp_param_group", "_fsdp_state", "_fully_shard")
    modules = [importlib.import_module(f"{package.__name__}.{name}") for name in names]
    group = modules[2].FSDPParamGroup
    answers = {
        "_get_device_from_mesh": lambda mesh: _DEVICE,
        "_get_device_handle": lambda kind="cuda": torch.cuda,
    }
    with ExitStack() as stack:
        stack.enter_context(replaced(group, _validate_no_meta_params=lambda self: None))
        for module in modules:
            present = {name: answer for name, answer in answers.items() if hasattr(module, name)}
            stack.enter_context(replaced(module, **present))
        yield
