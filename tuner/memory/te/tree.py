"""Puts the stand-in where `import transformer_engine` finds it."""

from __future__ import annotations

import importlib.machinery
import math
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from types import ModuleType
from typing import Any

import torch

from tuner.memory import issue
from tuner.memory.errors import UnsupportedError
from tuner.memory.graphs import weak_reference
from tuner.memory.kernels import modules_in_place
from tuner.memory.recorder import allocate
from tuner.memory.te import (
    apex,
    attention,
    base,
    checkpoint,
    deep_ep,
    delta_net,
    graph,
    grouped,
    linear,
    loss,
    mamba,
    moe,
    norm,
    offload,
    optimizers,
    primary,
    quantize,
    recipes,
    rope,
    state,
)
from tuner.memory.te.base import rows_of

_PROCESSES_AFTER_GATHER = (2, 10)
"""Megatron-Core renews weights in low precision after their all-gather from here on."""


class _Format(Enum):
    E4M3 = "e4m3"
    HYBRID = "hybrid"
    E5M2 = "e5m2"


class _RandomStates:
    """pytorch/distributed.py `CudaRNGStatesTracker`: named random states, none of them used."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.states_: dict[str, Any] = {}
        self.seeds_: set[int] = set()

    def get_states(self) -> dict[str, Any]:
        return dict(self.states_)

    def set_states(self, states: dict[str, Any]) -> None:
        self.states_ = states

    def add(self, name: str, seed: int) -> None:
        self.states_[name] = seed

    @contextmanager
    def fork(self, name: str = "model-parallel-rng") -> Iterator[None]:
        yield


def _general_gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    *args: Any,
    out_dtype: Any = None,
    layout: str = "TN",
    out: Any = None,
    **options: Any,
) -> tuple[Any, ...]:
    """cpp_extensions/gemm.py: one product of `b` and `a`; "T" means transposed."""
    columns, depth = (a.shape[0], a.shape[-1]) if layout[0] == "T" else (a.shape[-1], rows_of(a))
    rows = b.shape[:-1] if layout[1] == "N" else (b.shape[-1],)
    if out is None:
        out = allocate((*rows, columns), out_dtype or b.dtype)
    issue.gemm(math.prod(rows), columns, depth, b.dtype, output_bytes=out.element_size())
    return out, None, None, None


def _modules() -> dict[str, dict[str, Any]]:
    """Names of every module of the stand-in, by module."""
    recipe_names = {
        name: getattr(recipes, name)
        for name in (
            "DelayedScaling",
            "Float8CurrentScaling",
            "MXFP8BlockScaling",
            "Float8BlockScaling",
            "NVFP4BlockScaling",
        )
    } | {"Format": _Format, "Recipe": recipes.Recipe}
    precision = {
        name: getattr(quantize, name)
        for name in ("FP8GlobalStateManager", "fp8_autocast", "fp8_model_init")
    }
    layers = {
        "Linear": linear.Linear,
        "LayerNormLinear": linear.LayerNormLinear,
        "GroupedLinear": grouped.GroupedLinear,
        "DotProductAttention": attention.DotProductAttention,
        "LayerNorm": norm.LayerNorm,
        "RMSNorm": norm.RMSNorm,
        "Fp8Padding": moe.Fp8Padding,
        "Fp8Unpadding": moe.Fp8Unpadding,
    }
    rotary = {"apply_rotary_pos_emb": rope.apply_rotary_pos_emb}
    top = "transformer_engine.pytorch"
    return {
        "transformer_engine": {},
        "transformer_engine.common": {},
        "transformer_engine.common.recipe": recipe_names,
        top: layers | precision | {"checkpoint": checkpoint.checkpoint},
        f"{top}.fp8": precision,
        f"{top}.constants": {"TE_DType": {}},
        f"{top}.distributed": {
            "CudaRNGStatesTracker": _RandomStates,
            "checkpoint": checkpoint.checkpoint,
            "activation_recompute_forward": checkpoint.activation_recompute_forward,
            "is_fp8_activation_recompute_enabled": checkpoint.is_fp8_activation_recompute_enabled,
            "in_fp8_activation_recompute_phase": checkpoint.in_fp8_activation_recompute_phase,
            "get_all_rng_states": dict,
        },
        f"{top}.attention": {"_SplitAlongDim": rope.SplitAlongDim} | rotary,
        f"{top}.attention.rope": rotary,
        f"{top}.cpu_offload": {
            "get_cpu_offload_context": offload.get_cpu_offload_context,
            "mark_activation_offload": offload.mark_activation_offload,
        },
        f"{top}.permutation": {
            name: getattr(moe, name)
            for name in (
                "moe_permute",
                "moe_permute_with_probs",
                "moe_unpermute",
                "moe_sort_chunks_by_index",
                "moe_sort_chunks_by_index_with_probs",
            )
        },
        f"{top}.router": {
            name: getattr(moe, name)
            for name in (
                "fused_topk_with_score_function",
                "fused_compute_score_for_moe_aux_loss",
                "fused_moe_aux_loss",
            )
        },
        f"{top}.cross_entropy": {"parallel_cross_entropy": loss.parallel_cross_entropy},
        f"{top}.cpp_extensions": {"general_gemm": _general_gemm},
        f"{top}.graph": {
            "make_graphed_callables": graph.make_graphed_callables,
            **dict.fromkeys(
                (
                    "save_fp8_tensors",
                    "restore_fp8_tensors",
                    "set_capture_start",
                    "set_capture_end",
                ),
                graph.nothing,
            ),
        },
        f"{top}.utils": {"make_weak_ref": weak_reference},
        f"{top}.module": {},
        f"{top}.module.base": {
            "TransformerEngineBaseModule": base.TransformerEngineBaseModule,
            "get_workspace": state.use_workspace,
            "get_dummy_wgrad": state.dummy_gradient,
        },
        f"{top}.optimizers": {
            name: getattr(optimizers, name)
            for name in (
                "FusedAdam",
                "FusedSGD",
                "multi_tensor_applier",
                "multi_tensor_l2norm",
                "multi_tensor_scale",
                "multi_tensor_unscale_l2norm",
            )
        },
        f"{top}.tensor": {"QuantizedTensor": primary.QuantizedTensor},
        f"{top}.tensor.float8_tensor": {"Float8Tensor": primary.Float8Tensor},
        f"{top}.tensor.mxfp8_tensor": {"MXFP8Tensor": primary.MXFP8Tensor},
        f"{top}.tensor.float8_blockwise_tensor": {
            "Float8BlockwiseQTensor": primary.Float8BlockwiseQTensor
        },
        f"{top}.tensor.nvfp4_tensor": {"NVFP4Tensor": primary.NVFP4Tensor},
        f"{top}.tensor.utils": {
            "replace_raw_data": primary.replace_raw_data,
            "cast_master_weights_to_fp8": primary.cast_master_weights_to_fp8,
        },
        f"{top}.float8_tensor": {"Float8Tensor": primary.Float8Tensor},
    } | apex.MODULES


@contextmanager
def installed(version: str, architecture: str) -> Iterator[None]:
    """Make `import transformer_engine` give the stand-in for `version` inside this context.

    Megatron-Core asks for the package when it is imported, so it must not have been before.
    """
    state.reset(version, architecture)
    made = _made_modules(version)
    with modules_in_place(made):
        yield


def _made_modules(version: str) -> dict[str, ModuleType]:
    made: dict[str, ModuleType] = {}
    contents_of = _modules() | mamba.modules() | delta_net.modules() | deep_ep.modules()
    if state.process.version >= _PROCESSES_AFTER_GATHER:
        contents_of["transformer_engine.pytorch.tensor.utils"]["post_all_gather_processing"] = (
            primary.post_all_gather_processing
        )
    for name, contents in contents_of.items():
        module = ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        module.__path__ = []
        vars(module).update(contents)
        made[name] = module
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(made[parent], last, module)
    made["transformer_engine"].__version__ = version  # type: ignore[attr-defined]
    made["transformer_engine.pytorch"].ops = _Operations()  # type: ignore[attr-defined]
    return made


class _Operations:
    """pytorch/ops: named in annotations; making one of them is not modelled."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (_UnmodelledOperation,), {})


class _UnmodelledOperation:
    def __init__(self, *args: object, **options: object) -> None:
        raise UnsupportedError(
            f"Transformer Engine's operation {type(self).__name__} is not modelled",
            field="use_transformer_engine_op_fuser",
            fix="unset it and use_te_activation_func",
        )
