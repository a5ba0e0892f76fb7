"""Fused Adam and the multi-tensor helpers (pytorch/optimizers/*.py).

States are made at the first step. Kernels work on lists of tensors in place and allocate one
small result.
"""

from __future__ import annotations

from typing import Any

import torch

from tuner.memory import issue
from tuner.memory.te.state import process

_NARROW_MOMENTS_SINCE = (2, 14)
"""From here on the kernel reads bfloat16 moments itself (`fuse_unscale`)."""


class FusedAdam(torch.optim.Optimizer):
    """Adam whose states may be held in fewer bytes than float32."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        bias_correction: bool = True,
        adam_w_mode: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
        master_weight_dtype: torch.dtype = torch.float32,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        use_decoupled_grad: bool = False,
        store_param_remainders: bool = False,
        set_grad_none: bool | None = None,
    ) -> None:
        super().__init__(
            params,
            {
                "lr": lr,
                "bias_correction": bias_correction,
                "betas": betas,
                "eps": eps,
                "weight_decay": weight_decay,
            },
        )
        self.master_weights = master_weights
        self._reads_moments = (
            exp_avg_dtype is exp_avg_sq_dtype is torch.bfloat16
            and process.version >= _NARROW_MOMENTS_SINCE
        )
        self.store_param_remainders = (
            store_param_remainders and master_weights and master_weight_dtype is torch.float32
        )
        self.use_decoupled_grad = use_decoupled_grad
        self.capturable = capturable
        self.name_to_dtype_map = {
            "exp_avg": exp_avg_dtype,
            "exp_avg_sq": exp_avg_sq_dtype,
            "master_param": master_weight_dtype,
        }

    def zero_grad(self, set_to_none: bool = True) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if self.use_decoupled_grad:
                    parameter.decoupled_grad = None
                else:
                    parameter.grad = None

    def initialize_state(self, parameter: torch.Tensor, store_param_remainders: bool) -> None:
        for name in ("exp_avg", "exp_avg_sq"):
            self.state[parameter][name] = torch.zeros_like(
                parameter, dtype=self.name_to_dtype_map[name]
            )
        if self.master_weights:
            dtype = (
                torch.int16 if store_param_remainders else self.name_to_dtype_map["master_param"]
            )
            self.state[parameter]["master_param"] = torch.zeros_like(parameter, dtype=dtype)
            if not store_param_remainders:
                parameter.clone().detach().float()

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: Any = None, grad_scaler: Any = None
    ) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            widened, touched = [], 0
            for parameter in group["params"]:
                remainders = self.store_param_remainders and parameter.dtype is torch.bfloat16
                if not self.state[parameter]:
                    self.initialize_state(parameter, remainders)
                gradient = (
                    getattr(parameter, "decoupled_grad", None)
                    if self.use_decoupled_grad
                    else parameter.grad
                )
                if gradient is None:
                    continue
                states = issue.size_of(self.state[parameter].values())
                touched += 2 * (states + issue.size_of([parameter])) + issue.size_of([gradient])
                # Narrow states are widened for the kernel, all at once, and written back.
                for name, value in self.state[parameter].items():
                    if name == "master_param" and remainders:
                        continue
                    if name != "master_param" and self._reads_moments:
                        continue
                    if value.dtype is not torch.float32:
                        widened.append(value.float())
            issue.memory(touched, "optimizer")
            del widened


class FusedSGD(torch.optim.SGD):
    """SGD; its momentum buffers are PyTorch's."""


def multi_tensor_applier(function: Any, overflow: Any, lists: Any, *options: Any) -> Any:
    return function(2048 * 32, overflow, lists, *options)


def multi_tensor_l2norm(
    chunk_size: int, overflow: Any, lists: Any, per_parameter: bool = False, *options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    partial = torch.zeros(320, dtype=torch.float32, device="meta")
    norm = torch.zeros(1, dtype=torch.float32, device="meta")
    issue.touched(*lists[0])
    del partial
    return norm, torch.zeros(1, dtype=torch.float32, device="meta")


def multi_tensor_scale(chunk_size: int, overflow: Any, lists: Any, scale: Any) -> None:
    """Scales in place, or from one list into another."""
    issue.touched(*lists[0], *lists[1])


def multi_tensor_unscale_l2norm(
    chunk_size: int, overflow: Any, lists: Any, *options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    return multi_tensor_l2norm(chunk_size, overflow, lists)
