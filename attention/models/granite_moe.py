"""GraniteMoE: Mixtral's shape with four multipliers and all experts of a layer in one tensor.

Its softmax over the chosen logits equals softmax over all experts followed by renormalising.
"""

from typing import Any

from coterie.attention.models.hf_config import HFConfig
from coterie.attention.models.recipe import ExpertNames, Recipe, WeightNames, common_fields
from coterie.experts.config import MoEConfig

_MOE = "model.layers.{layer}.block_sparse_moe"


def _map_config(hf: HFConfig) -> dict[str, Any]:
    common = common_fields(hf)
    return common | {
        "attention_bias": hf.boolean("attention_bias", False),
        "embedding_multiplier": hf.number("embedding_multiplier", 1.0),
        "residual_multiplier": hf.number("residual_multiplier", 1.0),
        "attention_scale": hf.number("attention_multiplier", 1.0),
        "logits_scale": 1.0 / hf.number("logits_scaling", 1.0),
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
    family="granite_moe",
    architecture="GraniteMoeForCausalLM",
    model_type="granitemoe",
    map_config=_map_config,
    names=WeightNames(
        experts=ExpertNames(
            router=_MOE + ".router.layer.weight",
            fused_gate_up=_MOE + ".input_linear.weight",
            fused_down=_MOE + ".output_linear.weight",
        )
    ),
)
