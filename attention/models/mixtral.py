"""Mixtral: every layer is a MoE layer; softmax over all experts, the chosen ones renormalised."""

from typing import Any

from coterie.attention.models.hf_config import HFConfig
from coterie.attention.models.recipe import ExpertNames, Recipe, WeightNames, common_fields
from coterie.experts.config import MoEConfig

_MOE = "model.layers.{layer}.block_sparse_moe"


def _map_config(hf: HFConfig) -> dict[str, Any]:
    common = common_fields(
        hf, rope_theta=1000000.0, rms_norm_eps=1e-5, max_position_embeddings=4096 * 32
    )
    return common | {
        "sliding_window": hf.integer("sliding_window") if hf.has("sliding_window") else None,
        "moe": MoEConfig(
            num_experts=hf.integer("num_local_experts", 8),
            top_k=hf.integer("num_experts_per_tok", 2),
            hidden_size=common["hidden_size"],
            intermediate_size=common["intermediate_size"],
            norm_topk_prob=True,
        ),
        "moe_layers": tuple(range(common["num_layers"])),
    }


RECIPE = Recipe(
    family="mixtral",
    architecture="MixtralForCausalLM",
    model_type="mixtral",
    map_config=_map_config,
    names=WeightNames(
        experts=ExpertNames(
            router=_MOE + ".gate.weight",
            gate=_MOE + ".experts.{expert}.w1.weight",
            up=_MOE + ".experts.{expert}.w3.weight",
            down=_MOE + ".experts.{expert}.w2.weight",
        )
    ),
)
