"""Megatron-Core on a machine without CUDA.

Megatron-Core names the CUDA device, its streams and its random states literally. Inside
`cpu_device()` those names mean the CPU; each patch says which upstream code needs it and all are
undone on the way out. The patches change where tensors live and nothing of what is computed.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any


class _Stream:
    """Work on the CPU is done when the call returns, so streams and events do nothing."""

    cuda_stream = 0

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def wait_stream(self, stream: object) -> None:
        pass

    def wait_event(self, event: object) -> None:
        pass

    def record_event(self, event: object = None) -> _Event:
        return _Event()

    def synchronize(self) -> None:
        pass


class _Event:
    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def record(self, stream: object = None) -> None:
        pass

    def wait(self, stream: object = None) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


@contextmanager
def replaced(owner: object, **attributes: object) -> Iterator[None]:
    """Set attributes of `owner`, and put back or delete them afterwards."""
    own = vars(owner)
    before = {name: own[name] for name in attributes if name in own}
    for name, value in attributes.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name in attributes:
            if name in before:
                setattr(owner, name, before[name])
            else:
                delattr(owner, name)


@contextmanager
def without_compilation() -> Iterator[None]:
    """For importing Megatron-Core: megatron/core/jit.py `jit_fuser` is `torch.compile`.

    Decorating imports Dynamo and Inductor (over a second) and a first call compiles C++ code. The
    functions decorated under this patch stay plain for the life of the process.
    """
    import torch

    def plain(function: Any = None, **options: object) -> Any:
        return function if function is not None else plain

    with replaced(torch, compile=plain):
        yield


@contextmanager
def current_device_is_cpu() -> Iterator[None]:
    """tensor_parallel/layers.py and most modules allocate on `torch.cuda.current_device()`."""
    import torch

    with replaced(torch.cuda, current_device=lambda: torch.device("cpu")):
        yield


@contextmanager
def streams_do_nothing() -> Iterator[None]:
    """pipeline_parallel/p2p_communication.py synchronises; MoE dispatchers make streams."""
    import torch

    with replaced(
        torch.cuda,
        Stream=_Stream,
        Event=_Event,
        current_stream=_Stream,
        default_stream=_Stream,
        stream=lambda stream: _Stream(),
        synchronize=lambda device=None: None,
        empty_cache=lambda: None,
    ):
        yield


@contextmanager
def cuda_factories_make_cpu_tensors() -> Iterator[None]:
    """pipeline_parallel/schedules.py and optimizer/*.py create tensors with `device="cuda"`."""
    import torch

    def on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(factory)
        def create(*args: Any, **kwargs: Any) -> Any:
            if "device" in kwargs and _names_cuda(kwargs["device"]):
                kwargs["device"] = "cpu"
            return factory(*args, **kwargs)

        return create

    def _names_cuda(device: object) -> bool:
        return isinstance(device, (str, torch.device)) and str(device).startswith("cuda")

    names = ("tensor", "empty", "zeros", "ones", "full", "arange", "rand", "randn", "empty_like")
    with replaced(torch, **{name: on_cpu(getattr(torch, name)) for name in names}):
        yield


@contextmanager
def moving_to_cuda_stays() -> Iterator[None]:
    """models/common/language_module.py and rope_utils.py move tensors with `.cuda()`."""
    import torch

    def stay(self: Any, *args: object, **kwargs: object) -> Any:
        return self

    with replaced(torch.Tensor, cuda=stay), replaced(torch.nn.Module, cuda=stay):
        yield


@contextmanager
def types_are_named_cuda() -> Iterator[None]:
    """optimizer/distrib_optimizer.py and clip_grads.py compare `.type()` with CUDA names."""
    import torch

    original = torch.Tensor.type

    def type_name(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        if isinstance(result, str):
            return result.replace("torch.", "torch.cuda.", 1)
        return result

    with replaced(torch.Tensor, type=type_name):
        yield


@contextmanager
def cuda_random_states_are_the_cpus() -> Iterator[None]:
    """tensor_parallel/random.py saves, forks and restores CUDA random states.

    The CPU's default generator takes their place, so dropout stays reproducible under recompute.
    """
    import torch
    from megatron.core.tensor_parallel import random

    def get_state(device: object = None, clone: bool = False, graph_safe: bool = False) -> Any:
        return torch.get_rng_state()

    def set_state(new_state: Any, device: object = -1, graph_safe: bool = False) -> None:
        torch.set_rng_state(new_state)

    def is_not_about_the_cpu_state(record: logging.LogRecord) -> bool:
        # The tracker warns when the CPU's state moved inside a fork: here that is its purpose.
        return "CPU RNG state changed" not in record.getMessage()

    logger = logging.getLogger(random.__name__)
    logger.addFilter(is_not_about_the_cpu_state)
    try:
        with (
            replaced(random, _get_cuda_rng_state=get_state, _set_cuda_rng_state=set_state),
            replaced(torch.cuda, get_rng_state=get_state, manual_seed=torch.manual_seed),
        ):
            yield
    finally:
        logger.removeFilter(is_not_about_the_cpu_state)


@contextmanager
def quantization_is_off() -> Iterator[None]:
    """tensor_parallel/random.py `CheckpointWithoutOutput` asks Transformer Engine about FP8.

    It does so by default, with names that exist only where Transformer Engine is installed; it
    serves the recompute modules layernorm, moe_act and mla_up_proj.
    """
    from megatron.core.tensor_parallel import random

    class NoFp8:
        @staticmethod
        def is_fp8_enabled() -> bool:
            return False

    def nothing(*args: object, **kwargs: object) -> nullcontext[None]:
        return nullcontext()

    with replaced(
        random,
        FP8GlobalStateManager=NoFp8,
        activation_recompute_forward=nothing,
        fp8_autocast=nothing,
    ):
        yield


@contextmanager
def transformer_engine_names_are_types() -> Iterator[None]:
    """extensions/transformer_engine.py defines classes on a mock when the package is missing.

    multi_latent_attention.py and moe/shared_experts.py pass the result to `isinstance`, and
    moe/moe_utils.py `RouterGatingLinearFunction` reads a name that its failed import never set.
    """
    from megatron.core.extensions import transformer_engine
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.moe import moe_utils

    from trainables.megatron_core.layers import DuplicatedLinear

    class NotInstalled:
        pass

    with (
        replaced(transformer_engine, TELinear=NotInstalled),
        # The class that MLASelfAttention builds in `duplicated` mode.
        replaced(multi_latent_attention, TELinear=DuplicatedLinear, HAVE_TE=False),
        replaced(moe_utils, te_general_gemm=None),
    ):
        yield


@contextmanager
def expert_splits_become_arrays() -> Iterator[None]:
    """moe/token_dispatcher.py turns split sizes into NumPy arrays only when they are on CUDA."""
    from megatron.core.transformer.moe import token_dispatcher

    def move(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and hasattr(tensor, "numpy") else tensor

    with replaced(token_dispatcher, maybe_move_tensor_to_cpu=move):
        yield


@contextmanager
def uneven_collectives_work() -> Iterator[None]:
    """tensor_parallel/mappings.py gathers and reduce-scatters lists of unequal parts.

    Expert tensor parallelism does so with the tokens of local experts. NCCL turns such a call
    into broadcasts and reductions, Gloo refuses it.
    """
    from torch import distributed

    original_gather, original_scatter = distributed.all_gather, distributed.reduce_scatter

    def is_even(parts: Sequence[Any]) -> bool:
        return len({part.shape for part in parts}) == 1

    def all_gather(parts: Any, tensor: Any, group: Any = None, async_op: bool = False) -> Any:
        if is_even(parts) or async_op:
            return original_gather(parts, tensor, group, async_op)
        for rank, part in enumerate(parts):
            if rank == distributed.get_rank(group):
                part.copy_(tensor)
            distributed.broadcast(part, group=group, group_src=rank)
        return None

    def reduce_scatter(
        output: Any, parts: Any, op: Any = None, group: Any = None, async_op: bool = False
    ) -> Any:
        op = distributed.ReduceOp.SUM if op is None else op
        if is_even(parts) or async_op:
            return original_scatter(output, parts, op, group, async_op)
        for rank, part in enumerate(parts):
            reduced = part.clone()
            distributed.reduce(reduced, op=op, group=group, group_dst=rank)
            if rank == distributed.get_rank(group):
                output.copy_(reduced)
        return None

    with replaced(distributed, all_gather=all_gather, reduce_scatter=reduce_scatter):
        yield


@contextmanager
def equal_groups_are_shared() -> Iterator[None]:
    """parallel_state.py `initialize_model_parallel` makes some thirty groups, many of equal ranks.

    Every Gloo group keeps threads that wake a hundred times a second; on few cores they slow the
    steps down several times. Groups of the same ranks become one.
    """
    from torch import distributed

    original = distributed.new_group
    groups: dict[tuple[int, ...], Any] = {}

    def new_group(ranks: Any = None, *args: Any, **kwargs: Any) -> Any:
        key = tuple(range(distributed.get_world_size()) if ranks is None else ranks)
        if key not in groups:
            groups[key] = original(ranks, *args, **kwargs)
        return groups[key]

    with replaced(distributed, new_group=new_group):
        yield


@contextmanager
def lone_ranks_do_not_reduce() -> Iterator[None]:
    """transformer/mlp.py adds an expert's bias in place to what `RowParallelLinear` returns.

    With an expert tensor parallel size of 1 that is its input as a view made by a custom
    function, which autograd refuses to change. Transformer Engine's layer returns a plain tensor.
    """
    from megatron.core.tensor_parallel import layers

    def skipped_alone(original: Callable[..., Any]) -> Callable[..., Any]:
        def reduce(tensor: Any, group: Any = None, **kwargs: Any) -> Any:
            if group is not None and group.size() == 1:
                return tensor
            return original(tensor, group=group, **kwargs)

        return reduce

    names = (
        "reduce_from_tensor_model_parallel_region",
        "reduce_scatter_to_sequence_parallel_region",
    )
    with replaced(layers, **{name: skipped_alone(getattr(layers, name)) for name in names}):
        yield


@contextmanager
def optimizers_import_no_compiler() -> Iterator[None]:
    """torch/optim/optimizer.py guards methods of optimizers against compilation.

    The guards import Dynamo on the first call, about a second of every start. The one of `step`
    turns gradients off besides.
    """
    import torch
    from torch.optim import Adam, Optimizer

    def unguarded(method: Callable[..., Any]) -> Callable[..., Any]:
        return getattr(method, "__wrapped__", method)

    names = ("add_param_group", "state_dict", "load_state_dict")
    methods = {name: unguarded(getattr(Optimizer, name)) for name in names}
    step = torch.no_grad()(unguarded(Adam.step))
    with replaced(Optimizer, **methods), replaced(Adam, step=step):
        yield


PATCHES: tuple[Callable[[], Any], ...] = (
    current_device_is_cpu,
    streams_do_nothing,
    cuda_factories_make_cpu_tensors,
    moving_to_cuda_stays,
    types_are_named_cuda,
    cuda_random_states_are_the_cpus,
    quantization_is_off,
    transformer_engine_names_are_types,
    expert_splits_become_arrays,
    uneven_collectives_work,
    equal_groups_are_shared,
    lone_ranks_do_not_reduce,
    optimizers_import_no_compiler,
)
"""Patches of `cpu_device`, in the order they are applied."""


@contextmanager
def cpu_device(patches: Sequence[Callable[[], Any]] = PATCHES) -> Iterator[None]:
    """Run Megatron-Core on the CPU inside this context; `patches` lists what is adapted."""
    with ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch())
        yield
