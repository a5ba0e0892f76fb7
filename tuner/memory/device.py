"""A CUDA device without memory: Megatron-Core's device calls under a `Recorder`.

Builds on the CPU adaptation of the real runs and changes what a device without data needs:
reading values, moving tensors between host and device, and asking the device about itself. Each
patch is a context manager, named for what it makes true, and is undone on the way out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import torch

from trainables.megatron_core import cpu_device
from trainables.megatron_core.cpu_device import replaced
from tuner.memory.recorder import Handler, Recorder
from tuner.memory.values import item_of, real_copy

aten = torch.ops.aten

_CAPABILITY = {"ampere": (8, 0), "hopper": (9, 0), "blackwell": (10, 0)}


@contextmanager
def device_without_data(recorder: Recorder, architecture: str = "hopper") -> Iterator[None]:
    """Run Megatron-Core inside this context on tensors without data.

    With `recorder.host_counts` the step is that of a CPU-only machine, whose tensors all live on
    the host; otherwise that of a CUDA device of `architecture`.
    """
    with ExitStack() as stack:
        stack.enter_context(cpu_device.streams_do_nothing())
        stack.enter_context(cpu_device.cuda_random_states_are_the_cpus())
        stack.enter_context(_types_are_named_cuda())
        if recorder.host_counts:
            stack.enter_context(cpu_device.current_device_is_cpu())
            stack.enter_context(cpu_device.cuda_factories_make_cpu_tensors())
            stack.enter_context(cpu_device.moving_to_cuda_stays())
            stack.enter_context(cpu_device.quantization_is_off())
            stack.enter_context(cpu_device.transformer_engine_names_are_types())
            stack.enter_context(cpu_device.expert_splits_become_arrays())
        else:
            stack.enter_context(_cuda_is_there(recorder, _CAPABILITY[architecture]))
            stack.enter_context(_tensors_move())
            stack.enter_context(_dropout_is_one_kernel())
            stack.enter_context(_fused_optimizers_run())
        stack.enter_context(_values_can_be_read(recorder))
        if not recorder.host_counts:
            stack.enter_context(_activations_can_be_offloaded())
        yield


def handlers() -> dict[Any, Handler]:
    """Stand-ins for operators that read data or move it off the device."""
    return {
        aten._local_scalar_dense.default: lambda recorder, func, args, kwargs: item_of(
            recorder.values, args[0]
        ),
        aten._to_copy.default: _to_copy,
        aten.full.default: _full,
        aten.masked_select.default: _masked_select,
        aten.sum.dim_IntList: _sum,
        aten.equal.default: lambda recorder, func, args, kwargs: True,
        aten._amp_foreach_non_finite_check_and_unscale_.default: _unscale,
        aten.record_stream.default: lambda recorder, func, args, kwargs: None,
    }


def _to_copy(recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    device = kwargs.get("device")
    to_host = device is not None and torch.device(device).type == "cpu"
    if device is not None:
        kwargs = {k: v for k, v in kwargs.items() if k not in ("device", "non_blocking")}
        if not to_host:
            kwargs["device"] = "meta"
    result = func(*args, **kwargs)
    recorder.values.carry(func, args, kwargs, result)
    if to_host and not recorder.host_counts:
        known = recorder.values.get(args[0])
        if known is not None:
            return known.clone()
        recorder.see(result)
        recorder.move_to_host(result)
    elif device is not None and recorder.on_host(args[0]):
        recorder.see(result)  # before the mode takes it for a host tensor
    return result


def _full(recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A filled tensor; small ones are remembered, such as the capacity of each expert."""
    device = kwargs.get("device")
    on_host = device is None or torch.device(device).type == "cpu"
    if on_host and not recorder.host_counts:
        return func(*args, **kwargs)
    result = func(*args, **dict(kwargs, device="meta", pin_memory=False))
    if not result.is_floating_point() and result.numel() <= 4096:
        recorder.values.set(result, func(*args, **dict(kwargs, device="cpu")))
    return result


def _masked_select(
    recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    source, mask = args
    return source.new_empty(round(recorder.values.count(mask.shape)))


def _sum(recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Sums; those over a routing map count tokens, and balanced routing says how many."""
    result = func(*args, **kwargs)
    source = args[0]
    if source.dtype is torch.bool and recorder.values.get(source) is None:
        total = recorder.values.count(source.shape)
        recorder.values.set(result, recorder.values.spread(result.shape, total, result.dtype))
    else:
        recorder.values.carry(func, args, kwargs, result)
    return result


def _unscale(recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Scaled gradients are taken to be finite, or the optimizer would skip its step."""
    recorder.values.set(args[1], torch.zeros(args[1].shape))


@contextmanager
def _types_are_named_cuda() -> Iterator[None]:
    """optimizer/distrib_optimizer.py and clip_grads.py compare `.type()` with CUDA names."""
    original = torch.Tensor.type

    def type_name(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        if isinstance(result, str):
            return result.replace("torch.meta.", "torch.").replace("torch.", "torch.cuda.", 1)
        return result

    with replaced(torch.Tensor, type=type_name):
        yield


@contextmanager
def _values_can_be_read(recorder: Recorder) -> Iterator[None]:
    """transformer/moe/token_dispatcher.py turns split sizes into lists and arrays."""
    tolist, numpy, make = torch.Tensor.tolist, torch.Tensor.numpy, torch.tensor

    def plain(data: Any) -> Any:
        if isinstance(data, torch.Tensor):
            return item_of(recorder.values, data) if data.is_meta and data.dim() == 0 else data
        return [plain(part) for part in data] if isinstance(data, (list, tuple)) else data

    def tensor(data: Any, *args: Any, **kwargs: Any) -> Any:
        return make(plain(data), *args, **kwargs)

    def to_list(self: Any) -> Any:
        return tolist(real_copy(recorder.values, self, "Tensor.tolist"))

    def to_numpy(self: Any, *args: Any, **kwargs: Any) -> Any:
        return numpy(real_copy(recorder.values, self, "Tensor.numpy"), *args, **kwargs)

    with (
        replaced(torch.Tensor, tolist=to_list, numpy=to_numpy),
        replaced(torch, tensor=tensor),
    ):
        yield


_CAPTURE_CHECKS = ("_accelerator_graph_capture_health_check", "_cuda_graph_capture_health_check")
"""Of PyTorch's optimizers: a build for CUDA asks the driver, which need not be there."""


@contextmanager
def _cuda_is_there(recorder: Recorder, capability: tuple[int, int]) -> Iterator[None]:
    """Device questions of Megatron-Core and Transformer Engine, answered for one GPU."""
    properties = SimpleNamespace(
        major=capability[0], minor=capability[1], multi_processor_count=132, name="dry run"
    )
    with (
        replaced(
            torch.cuda,
            current_device=lambda: torch.device("cuda", 0),
            device_count=lambda: 1,
            is_available=lambda: True,
            get_device_capability=lambda device=None: capability,
            get_device_properties=lambda device=None: properties,
            memory_allocated=lambda device=None: 0,
            max_memory_allocated=lambda device=None: 0,
            is_current_stream_capturing=lambda: False,
            _lazy_init=lambda: None,
        ),
        replaced(
            torch.optim.Optimizer,
            **{
                name: lambda self: None
                for name in _CAPTURE_CHECKS
                if hasattr(torch.optim.Optimizer, name)
            },
        ),
        replaced(torch.cuda.nvtx, range_push=lambda message: 0, range_pop=lambda: 0),
        replaced(
            torch.Tensor,
            is_cuda=property(lambda self: self.is_meta and not recorder.on_host(self)),
            record_stream=lambda self, stream: None,
        ),
    ):
        yield


@contextmanager
def _tensors_move() -> Iterator[None]:
    """Moves to CUDA, and `torch.tensor` on it, which a build without CUDA refuses.

    ssm/gated_delta_net.py fills a parameter by `torch.ones` with both a device and `out`.
    """
    make, make_ones = torch.tensor, torch.ones

    def to_device(self: Any, *args: object, **kwargs: object) -> Any:
        return self if self.is_meta else self.to("meta")

    def tensor(*args: Any, device: Any = None, pin_memory: bool = False, **kwargs: Any) -> Any:
        values = make(*args, **kwargs)
        if device is None or torch.device(device).type == "cpu":
            return values
        return values.to("meta").requires_grad_(values.requires_grad)

    def ones(*args: Any, out: Any = None, device: Any = None, **kwargs: Any) -> Any:
        if out is not None:  # its device is taken for another one
            return make_ones(*args, out=out, **kwargs)
        return make_ones(*args, device=device, **kwargs)

    def stay(self: Any, *args: object, **kwargs: object) -> Any:
        return self

    with (
        replaced(torch.Tensor, cuda=to_device, pin_memory=stay),
        replaced(torch.nn.Module, cuda=_module_to_device),
        replaced(torch, tensor=tensor, ones=ones),
    ):
        yield


@contextmanager
def _activations_can_be_offloaded() -> Iterator[None]:
    """pipeline_parallel/fine_grained_activation_offload.py compares device names from 0.19 on."""
    from megatron.core.pipeline_parallel import fine_grained_activation_offload as offload

    name = "_can_manage_tensor_for_offload"
    if not hasattr(offload.ChunkOffloadHandler, name):
        yield
        return

    def can_manage(tensor: torch.Tensor) -> bool:
        return tensor.is_cuda and not isinstance(tensor, torch.nn.Parameter)

    with replaced(offload.ChunkOffloadHandler, **{name: staticmethod(can_manage)}):
        yield


@contextmanager
def _fused_optimizers_run() -> Iterator[None]:
    """optimizer/cpu_offloading/hybrid_optimizer.py makes `torch.optim.AdamW(fused=True)`."""
    from torch.optim import optimizer

    with replaced(optimizer, _get_fused_kernels_supported_devices=lambda: ["cpu", "cuda", "meta"]):
        yield


@contextmanager
def _dropout_is_one_kernel() -> Iterator[None]:
    """On CUDA dropout keeps a mask of bytes (aten/src/ATen/native/Dropout.cpp); elsewhere, and so
    without this, it keeps noise of the input's type."""
    original = torch.nn.functional.dropout

    def dropout(
        input: torch.Tensor,
        p: float = 0.5,
        training: bool = True,
        inplace: bool = False,
    ) -> torch.Tensor:
        if not training or inplace or not 0.0 < p < 1.0:
            return original(input, p, training, inplace)
        return torch.native_dropout(input, p, True)[0]

    with replaced(torch.nn.functional, dropout=dropout):
        yield


def _module_to_device(module: Any, *args: object, **kwargs: object) -> Any:
    apply: Callable[..., Any] = module._apply
    return apply(lambda tensor: tensor.cuda())
