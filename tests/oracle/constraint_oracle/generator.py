"""Seeded random candidates: a consistent base, random optional parts, then 0 to 3 mutations.

About half of what is drawn is valid. The base is drawn from structure (sizes that divide, a world
that fits the layout), never from recorded candidates; mutations come from
:mod:`constraint_oracle.pool`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from constraint_oracle import bundles, pool

Config = dict[str, Any]

RECOMPUTABLE = ("core_attn", "mlp", "layernorm")
RECOMPUTABLE_MOE = (*RECOMPUTABLE, "moe", "moe_act", "shared_experts")
OFFLOADABLE = ("core_attn", "attn_proj", "attn_norm", "mlp_norm", "qkv_linear")
OFFLOADABLE_MOE = (*OFFLOADABLE, "expert_fc1", "moe_act")
GRAPH_MODULES = ([], ["attn"], ["attn", "mlp"])
GRAPH_MODULES_MOE = (
    [],
    ["attn"],
    ["moe"],
    ["attn", "moe_router"],
    ["moe_router", "moe_preprocess"],
)


@dataclass(frozen=True, slots=True)
class Weights:
    """Probabilities of the optional parts, of each number of mutations and of their groups."""

    moe: float = 0.4
    recompute: float = 0.35
    graphs: float = 0.3
    fine_grained_offload: float = 0.15
    cpu_offload: float = 0.05
    low_precision: float = 0.25
    uneven_layers: float = 0.2
    expert_overlap: float = 0.12
    dropout: float = 0.15
    latent_attention: float = 0.06
    bridge_parts: float = 0.45
    bundle: float = 0.15
    mutations: tuple[float, ...] = (0.5, 0.3, 0.13, 0.07)
    groups: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(pool.GROUPS, 1.0) | {"variants": 0.1}
    )


class CandidateGenerator:
    """Draws candidates for one version and front end.

    Args:
        seed: the same seed, version, front end and weights give the same candidates.
        mcore: Megatron-Core version; decides the spelling of the CUDA-graph fields.
        frontend: "bridge" adds the parts only Megatron Bridge has.
    """

    def __init__(
        self, seed: int, mcore: str, frontend: str = "mcore", weights: Weights | None = None
    ) -> None:
        self.random = random.Random(f"{seed} {mcore} {frontend}")
        self.frontend = frontend
        self.weights = weights or Weights()
        self.new_graph_fields = mcore >= "0.18"
        self.bundles = bundles.COMMON + (bundles.NEWER if mcore >= "0.17" else [])

    def __iter__(self) -> Iterator[Config]:
        while True:
            yield self.draw()

    def draw(self) -> Config:
        """One candidate: about half the time valid."""
        config = self._base()
        for add in self._parts(config):
            add(config)
        if self._chance(self.weights.bundle):
            self._bundle(config)
        for _ in range(self._count_mutations()):
            self._mutate(config)
        return config

    def _chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def _some(self, names: tuple[str, ...]) -> list[str]:
        count = self.random.randint(1, min(3, len(names)))
        return self.random.sample(names, count)

    # The base: an architecture and a layout that fit together.

    def _base(self) -> Config:
        pick = self.random.choice
        tensor, pipeline, context = pick((1, 1, 2, 4, 8)), pick((1, 1, 2, 4, 8)), pick((1, 1, 2, 4))
        heads = pick((16, 32, 64))
        hidden = pick((1024, 2048, 4096, 8192))
        config: Config = {
            "hidden_size": hidden,
            "num_attention_heads": heads,
            "ffn_hidden_size": hidden * pick((2, 3, 4)),
            "num_layers": pick((1, 2, 3, 4)) * pipeline,
            "tensor_model_parallel_size": tensor,
            "pipeline_model_parallel_size": pipeline,
            "context_parallel_size": context,
            "bf16": True,
            "params_dtype": "bf16",
            "add_bias_linear": False,
            "gated_linear_unit": True,
            "activation_func": "silu",
            "bias_activation_fusion": self._chance(0.5),
            "normalization": "RMSNorm",
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
        }
        if self._chance(0.8):
            config["num_query_groups"] = pick((1, 4, 8, heads))
        if tensor > 1 and self._chance(0.7):
            config["sequence_parallel"] = True
        if pipeline > 1:
            config["pipeline_dtype"] = "bf16"
            self._virtual_stages(config)
        if self._chance(self.weights.dropout):
            config["hidden_dropout"] = config["attention_dropout"] = 0.1
        moe = self._chance(self.weights.moe)
        if moe:
            self._experts(config)
        self._batch(config)
        self._data_parallel(config)
        return config

    def _virtual_stages(self, config: Config) -> None:
        if not self._chance(0.45):
            return
        virtual = self.random.choice((2, 2, 3, 4))
        config["virtual_pipeline_model_parallel_size"] = virtual
        config["num_layers"] = (
            config["pipeline_model_parallel_size"] * virtual * self.random.choice((1, 2, 3))
        )
        config["overlap_p2p_comm"] = True
        config["batch_p2p_comm"] = False

    def _experts(self, config: Config) -> None:
        pick = self.random.choice
        tensor = config["tensor_model_parallel_size"]
        if tensor > 1:
            config["sequence_parallel"] = True
        config |= {
            "num_moe_experts": pick((2, 4, 8, 16, 32)),
            "expert_tensor_parallel_size": pick((1, 1, tensor)),
            "moe_ffn_hidden_size": config["hidden_size"] // 2,
            "moe_router_topk": 2,
            "moe_grouped_gemm": self._chance(0.7),
            "moe_token_dispatcher_type": pick(("allgather", "alltoall", "alltoall", "flex")),
        }
        expert_sizes = [n for n in (1, 2, 4, 8) if config["num_moe_experts"] % n == 0]
        config["expert_model_parallel_size"] = pick(expert_sizes)
        if config["moe_token_dispatcher_type"] == "flex":
            config["moe_flex_dispatcher_backend"] = pick(("deepep", "hybridep"))
        if self._chance(0.25):
            config["moe_shared_expert_intermediate_size"] = config["hidden_size"]
            config["moe_shared_expert_overlap"] = self._chance(0.4)
        if self._chance(0.2):
            config["moe_expert_capacity_factor"] = pick((1.0, 1.5))
            config["moe_pad_expert_input_to_capacity"] = self._chance(0.5)
        if self._chance(0.15):
            config["moe_layer_freq"] = self._layer_frequency(config["num_layers"])
        if self._chance(0.15):
            config["moe_permute_fusion"] = True

    def _layer_frequency(self, layers: int) -> Any:
        dense = self.random.randint(0, min(2, layers))
        return self.random.choice((1, 2, [0] * dense + [1] * (layers - dense)))

    def _batch(self, config: Config) -> None:
        """A world that both the dense and the expert grid divide, and whole micro-batches."""
        pick = self.random.choice
        pipeline = config["pipeline_model_parallel_size"]
        tensor = config["tensor_model_parallel_size"]
        dense = tensor * pipeline * config["context_parallel_size"]
        expert = config.get("expert_tensor_parallel_size", 1) * config.get(
            "expert_model_parallel_size", 1
        )
        world = dense * pick((1, 2, 4))
        while world % (expert * pipeline):
            world *= 2
        micro = pick((1, 2, 4))
        per_rank = pick((1, 2, 4, 8)) * (pipeline if self._chance(0.8) else 1)
        config |= {
            "world_size": world,
            "micro_batch_size": micro,
            "global_batch_size": micro * per_rank * (world // dense),
            "seq_length": pick((2048, 4096, 8192)),
        }

    def _data_parallel(self, config: Config) -> None:
        distributed = self._chance(0.8)
        config |= {
            "use_distributed_optimizer": distributed,
            "overlap_grad_reduce": self._chance(0.7),
            "overlap_param_gather": distributed and self._chance(0.5),
        }
        if distributed and self._chance(0.15):
            config["use_precision_aware_optimizer"] = True
        if self._chance(0.08):
            config["optimizer_cpu_offload"] = True
            config["optimizer_offload_fraction"] = self.random.choice((0.25, 0.5, 1.0))
        if self._chance(0.2):
            config["gradient_accumulation_fusion"] = True

    # Optional parts: each is usually consistent with the base, not with every other part.

    def _parts(self, config: Config) -> list[Callable[[Config], None]]:
        weights = self.weights
        moe = "num_moe_experts" in config
        pipelined = config["pipeline_model_parallel_size"] > 1
        table: list[tuple[float, Callable[[Config], None]]] = [
            (weights.recompute, self._recompute),
            (weights.graphs, self._graphs),
            (weights.fine_grained_offload, self._fine_grained_offload),
            (weights.cpu_offload * (0.3 if pipelined else 1.5), self._cpu_offload),
            (weights.low_precision, self._low_precision),
            (weights.uneven_layers, self._uneven_layers),
            (weights.expert_overlap * (2 if moe else 0.1), self._expert_overlap),
            (weights.latent_attention, self._latent_attention),
            (0.5, self._environment),
        ]
        if self.frontend == "bridge":
            table.append((weights.bridge_parts, self._bridge))
        return [add for probability, add in table if self._chance(probability)]

    def _recompute(self, config: Config) -> None:
        if self._chance(0.45):
            layers = config["num_layers"] // config["pipeline_model_parallel_size"]
            layers //= config.get("virtual_pipeline_model_parallel_size") or 1
            config["recompute_granularity"] = "full"
            config["recompute_method"] = self.random.choice(("uniform", "block"))
            config["recompute_num_layers"] = self.random.randint(1, max(1, layers))
            return
        config["recompute_granularity"] = "selective"
        moe = "num_moe_experts" in config
        config["recompute_modules"] = self._some(RECOMPUTABLE_MOE if moe else RECOMPUTABLE)

    def _graphs(self, config: Config) -> None:
        implementations = ["local", "transformer_engine"]
        if self.new_graph_fields:
            implementations.append("full_iteration")
        config["cuda_graph_impl"] = implementation = self.random.choice(implementations)
        config["use_te_rng_tracker"] = True
        config["cuda_graph_warmup_steps"] = self.random.choice((0, 3, 3, 3))
        if self.frontend == "bridge" and self._chance(0.7):
            config["check_for_nan_in_loss"] = False
        if implementation == "full_iteration":
            return
        moe = "num_moe_experts" in config
        modules = self.random.choice(GRAPH_MODULES_MOE if moe else GRAPH_MODULES)
        if not self.new_graph_fields and implementation == "local" and self._chance(0.2):
            modules = ["full_iteration"]
        name = "cuda_graph_modules" if self.new_graph_fields else "cuda_graph_scope"
        config[name] = list(modules)

    def _fine_grained_offload(self, config: Config) -> None:
        config["fine_grained_activation_offloading"] = True
        moe = "num_moe_experts" in config
        modules = self._some(OFFLOADABLE_MOE if moe else OFFLOADABLE)
        if "attn_proj" in modules and "core_attn" not in modules and self._chance(0.7):
            modules.append("core_attn")
        config["offload_modules"] = modules
        if self._chance(0.8):
            config["env"] = config.get("env", {}) | {"NVTE_CPU_OFFLOAD_V1": "1"}
        if self.new_graph_fields and self._chance(0.3):
            config["fine_grained_offloading_max_inflight_offloads"] = 2

    def _cpu_offload(self, config: Config) -> None:
        config["cpu_offloading"] = True
        config["cpu_offloading_num_layers"] = max(0, config["num_layers"] - 1)
        config["cpu_offloading_weights"] = self._chance(0.3)

    def _low_precision(self, config: Config) -> None:
        if self._chance(0.2):
            config["fp4"], config["fp4_recipe"] = "e2m1", "nvfp4"
            return
        config["fp8"] = self.random.choice(("e4m3", "hybrid"))
        config["fp8_recipe"] = self.random.choice(("delayed", "tensorwise", "blockwise", "mxfp8"))
        if self._chance(0.15):
            config["fp8_param_gather"] = True
            if config["fp8_recipe"] == "mxfp8" and self._chance(0.7):
                config["reuse_grad_buf_for_mxfp8_param_ag"] = True
        if self._chance(0.1):
            config["first_last_layers_bf16"] = True

    def _uneven_layers(self, config: Config) -> None:
        stages = config["pipeline_model_parallel_size"]
        virtual = config.get("virtual_pipeline_model_parallel_size") or 1
        self.random.choice((self._first_last, self._accounted, self._layout))(
            config, stages, virtual
        )

    def _first_last(self, config: Config, stages: int, virtual: int) -> None:
        first, last = (virtual * self.random.choice((1, 1, 2, 3)) for _ in range(2))
        which = self.random.choice(("first", "last", "both"))
        middle = stages - (2 if which == "both" else 1)
        layers = middle * virtual * self.random.choice((1, 2, 3))
        if which in ("first", "both"):
            config["num_layers_in_first_pipeline_stage"] = first
            layers += first
        if which in ("last", "both"):
            config["num_layers_in_last_pipeline_stage"] = last
            layers += last
        config["num_layers"] = max(1, layers)

    def _accounted(self, config: Config, stages: int, virtual: int) -> None:
        names = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
        chosen = self.random.choice((names, names[:1], names[1:]))
        config |= dict.fromkeys(chosen, True)
        layers = stages * virtual * self.random.choice((1, 2, 3)) - len(chosen)
        config["num_layers"] = max(1, layers)

    def _layout(self, config: Config, stages: int, virtual: int) -> None:
        counts = [self.random.randint(0, 3) for _ in range(stages * virtual)]
        counts[0] = max(1, counts[0])
        names = [["decoder"] * count for count in counts]
        names[0].insert(0, "embedding")
        names[-1].append("loss")
        config["num_layers"] = sum(counts)
        layout: Any = names
        if self._chance(0.4):
            letters = {"embedding": "E", "decoder": "t", "loss": "L"}
            layout = "|".join("".join(letters[name] for name in stage) for stage in names)
        config["pipeline_model_parallel_layout"] = layout
        if self._chance(0.5):
            config.pop("virtual_pipeline_model_parallel_size", None)

    def _expert_overlap(self, config: Config) -> None:
        config["overlap_moe_expert_parallel_comm"] = True
        if self._chance(0.7):
            config["moe_shared_expert_overlap"] = False
        if self._chance(0.5):
            config["delay_wgrad_compute"] = self._chance(0.7)
        if config.get("moe_token_dispatcher_type") == "allgather":
            config["moe_token_dispatcher_type"] = "alltoall"

    def _latent_attention(self, config: Config) -> None:
        config["multi_latent_attention"] = True

    def _environment(self, config: Config) -> None:
        env = dict(config.get("env", {}))
        env["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
        if "cuda_graph_impl" in config and self._chance(0.3):
            env["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
            env["NCCL_GRAPH_REGISTER"] = self.random.choice(("0", "0", "1"))
        config["env"] = env

    def _bridge(self, config: Config) -> None:
        name = self.random.choice(("comm_overlap", "comm_overlap", *pool.BRIDGE))
        config[name] = self.random.choice(pool.BRIDGE[name])
        if name == "use_megatron_fsdp" and self._chance(0.6):
            config["ckpt_format"] = "fsdp_dtensor"

    # Combinations and single changes.

    def _bundle(self, config: Config) -> None:
        bundle = dict(self.random.choice(self.bundles))
        if "cuda_graph_modules" in bundle and not self.new_graph_fields:
            bundle["cuda_graph_scope"] = bundle.pop("cuda_graph_modules")
        if "env" in bundle:
            bundle["env"] = config.get("env", {}) | bundle["env"]
        config |= bundle

    def _count_mutations(self) -> int:
        weights = self.weights.mutations
        return self.random.choices(range(len(weights)), weights)[0]

    def _mutate(self, config: Config) -> None:
        weights = self.weights.groups
        group = self.random.choices(list(weights), list(weights.values()))[0]
        values = dict(pool.GROUPS[group])
        if self.frontend == "bridge" and group in ("run", "optimizer"):
            values |= pool.BRIDGE
        name = self.random.choice(sorted(values))
        value = self.random.choice(values[name])
        if name == "env":
            value = config.get("env", {}) | value
        config[name] = value
