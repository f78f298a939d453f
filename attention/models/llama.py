"""Llama: dense decoder, grouped-query attention, optional biases."""

from typing import Any

from coterie.attention.models.hf_config import HFConfig
from coterie.attention.models.recipe import Recipe, WeightNames, common_fields


def _map_config(hf: HFConfig) -> dict[str, Any]:
    return common_fields(hf) | {
        "attention_bias": hf.boolean("attention_bias", False),
        "mlp_bias": hf.boolean("mlp_bias", False),
    }


RECIPE = Recipe(
    family="llama",
    architecture="LlamaForCausalLM",
    model_type="llama",
    map_config=_map_config,
    names=WeightNames(),
)
