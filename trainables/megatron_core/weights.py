"""Initial weights that do not depend on the layout.

Megatron-Core draws each shard from its own random state, so two layouts of one model start from
different weights. Here a weight's value depends on the seed, its name in the whole model and its
position in the whole tensor; a rank computes exactly its shard.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainables.megatron_core.hashing import stream_id, uniform

if TYPE_CHECKING:
    import torch
    from megatron.core.models.gpt import GPTModel

_SINK = ".softmax_offset"
_RANDOM_VECTORS = (_SINK, ".router.bias")
"""Ends of the names of vectors that Megatron-Core draws at random; the others are constant."""

_CHUNK_ELEMENTS = {"cpu": 1 << 15, "cuda": 1 << 24}
"""Elements computed at once: what a core's cache holds; what fills a GPU."""

_DECODER_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")
_LOCAL_EXPERT = re.compile(r"\.local_experts\.(\d+)\.")
_GROUPED_EXPERT = re.compile(r"\.experts\.(linear_fc[12]\.(?:weight|bias))(\d+)$")
_ROUTED_EXPERT = re.compile(r"\.mlp\.experts\.")
_RESIDUAL_OUTPUT = re.compile(r"\.(linear_proj|linear_fc2)\.(weight|local_experts)")


@dataclass(frozen=True, slots=True)
class Shard:
    """Which part of a whole tensor a rank holds.

    `dim` is the split dimension, or None for a replicated tensor. `stride` is the number of
    blocks along `dim` that are split separately: 2 for the gate and up halves of a gated MLP.
    """

    dim: int | None
    rank: int
    size: int
    stride: int = 1

    def whole_index(self, local: torch.Tensor, local_length: int) -> torch.Tensor:
        """Positions along `dim` in the whole tensor for int64 positions in the shard."""
        block = local_length // self.stride
        return (local // block * self.size + self.rank) * block + local % block


def initialize_weights(model: GPTModel, seed: int) -> None:
    """Overwrite the random weights of one unwrapped model chunk; constant ones stay.

    They are uniform with the standard deviation Megatron-Core gives the same weight
    (`init_method_std`, and that over sqrt(2 * num_layers) for the two projections that write to
    the residual stream).
    """
    import torch

    config = model.config
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() < 2 and not name.endswith(_RANDOM_VECTORS):
                continue
            whole_name = _whole_name(name, model)
            std = config.init_method_std
            if _RESIDUAL_OUTPUT.search(name):
                std /= math.sqrt(2.0 * config.num_layers)
            elif name.startswith("embedding.") and config.embedding_init_method_std is not None:
                std = config.embedding_init_method_std
            _fill(parameter, _shard(name, parameter, config), stream_id(seed, whole_name), std)


def _whole_name(name: str, model: GPTModel) -> str:
    """The parameter's name in an unsplit model: global layer and expert numbers."""
    from megatron.core import parallel_state

    if name == "output_layer.weight" and model.share_embeddings_and_output_weights:
        return "embedding.word_embeddings.weight"
    layer = _DECODER_LAYER.match(name)
    if layer:
        number = model.decoder.layers[int(layer[1])].layer_number - 1
        name = f"decoder.layers.{number}.{name[layer.end() :]}"
    experts = model.config.num_moe_experts
    if experts:
        ranks = parallel_state.get_expert_model_parallel_world_size()
        first = parallel_state.get_expert_model_parallel_rank() * experts // ranks
        name = _LOCAL_EXPERT.sub(lambda match: f".experts.{int(match[1]) + first}.", name)
        name = _GROUPED_EXPERT.sub(
            lambda match: f".experts.experts.{int(match[2]) + first}.{match[1]}", name
        )
    return name


def _shard(name: str, parameter: torch.Tensor, config: object) -> Shard:
    from megatron.core import parallel_state

    # Sinks are per head, and so split, but do not say so.
    if not getattr(parameter, "tensor_model_parallel", False) and not name.endswith(_SINK):
        return Shard(None, 0, 1)
    if _ROUTED_EXPERT.search(name):
        rank = parallel_state.get_expert_tensor_parallel_rank()
        size = parallel_state.get_expert_tensor_parallel_world_size()
    else:
        rank = parallel_state.get_tensor_model_parallel_rank()
        size = parallel_state.get_tensor_model_parallel_world_size()
    gated = getattr(config, "gated_linear_unit", False) and ".linear_fc1." in name
    return Shard(getattr(parameter, "partition_dim", 0), rank, size, 2 if gated else 1)


def _fill(parameter: torch.Tensor, shard: Shard, stream: int, std: float) -> None:
    """Write the values of one shard, a bounded number of elements at a time."""
    import torch

    rows, columns = parameter.shape[0], math.prod(parameter.shape[1:])
    device = parameter.device
    row_index = torch.arange(rows, device=device)
    column_index = torch.arange(columns, device=device)
    whole_columns = columns
    if shard.dim == 0:
        row_index = shard.whole_index(row_index, rows)
    elif shard.dim == 1:
        column_index = shard.whole_index(column_index, columns)
        whole_columns = columns * shard.size
    # Quantised parameters of Transformer Engine cannot be written through a view.
    in_place = type(parameter.data) is torch.Tensor
    target = parameter.data if in_place else torch.empty(parameter.shape, device=device)
    flat = target.view(rows, columns)
    step = max(1, _CHUNK_ELEMENTS.get(device.type, 1 << 20) // columns)
    for start in range(0, rows, step):
        index = row_index[start : start + step, None] * whole_columns + column_index
        flat[start : start + step] = (uniform(index, stream) * 2.0 - 1.0) * (std * math.sqrt(3.0))
    if not in_place:
        parameter.data.copy_(target)
