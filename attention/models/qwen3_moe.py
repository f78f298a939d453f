"""Qwen3-MoE: RMS norm of every query and key head, and dense layers between the MoE layers."""

from typing import Any

from coterie.attention.models.hf_config import HFConfig
from coterie.attention.models.recipe import ExpertNames, Recipe, WeightNames, common_fields
from coterie.errors import ModelError
from coterie.experts.config import MoEConfig

_MLP = "model.layers.{layer}.mlp"


def _moe_layers(hf: HFConfig, num_layers: int, num_experts: int) -> tuple[int, ...]:
    step = hf.integer("decoder_sparse_step", 1)
    dense = hf.get("mlp_only_layers", [])
    if not isinstance(dense, list) or not all(isinstance(i, int) for i in dense):
        raise ModelError(f"config.json: mlp_only_layers must be a list of layers, got {dense!r}")
    if num_experts == 0:
        return ()
    return tuple(i for i in range(num_layers) if i not in dense and (i + 1) % step == 0)


def _moe(hf: HFConfig, hidden_size: int, num_experts: int) -> MoEConfig:
    return MoEConfig(
        num_experts=num_experts,
        top_k=hf.integer("num_experts_per_tok", 8),
        hidden_size=hidden_size,
        intermediate_size=hf.integer("moe_intermediate_size", 768),
        norm_topk_prob=hf.boolean("norm_topk_prob", False),
    )


def _map_config(hf: HFConfig) -> dict[str, Any]:
    common = common_fields(hf, max_position_embeddings=32768)
    # Published configs say num_experts; newer transformers writes num_local_experts.
    num_experts = hf.integer("num_experts", hf.integer("num_local_experts", 128, 0), 0)
    moe_layers = _moe_layers(hf, common["num_layers"], num_experts)
    windowed = hf.boolean("use_sliding_window", False) and hf.has("sliding_window")
    return common | {
        "attention_bias": hf.boolean("attention_bias", False),
        "qk_norm": True,
        "sliding_window": hf.integer("sliding_window") if windowed else None,
        "moe": _moe(hf, common["hidden_size"], num_experts) if moe_layers else None,
        "moe_layers": moe_layers,
    }


RECIPE = Recipe(
    family="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    model_type="qwen3_moe",
    map_config=_map_config,
    names=WeightNames(
        experts=ExpertNames(
            router=_MLP + ".gate.weight",
            gate=_MLP + ".experts.{expert}.gate_proj.weight",
            up=_MLP + ".experts.{expert}.up_proj.weight",
            down=_MLP + ".experts.{expert}.down_proj.weight",
        )
    ),
)
