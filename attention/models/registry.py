"""The families there are, and the sentence for those there are not."""

import difflib
from typing import Final

from coterie.attention.models import granite_moe, llama, mixtral, qwen3_moe
from coterie.attention.models.hf_config import HFConfig
from coterie.attention.models.recipe import Recipe
from coterie.errors import ModelError

RECIPES: Final = (llama.RECIPE, mixtral.RECIPE, qwen3_moe.RECIPE, granite_moe.RECIPE)
_BY_ARCHITECTURE: Final = {recipe.architecture: recipe for recipe in RECIPES}
_BY_MODEL_TYPE: Final = {recipe.model_type: recipe for recipe in RECIPES}
_BY_FAMILY: Final = {recipe.family: recipe for recipe in RECIPES}


def recipe_of(family: str) -> Recipe:
    """Recipe by its own family name (``ModelConfig.family``)."""
    return _BY_FAMILY[family]


def find_recipe(hf: HFConfig) -> Recipe:
    """Recipe for a config.json, by ``architectures`` first, then by ``model_type``.

    Raises:
        ModelError: unsupported; names what was found, what is supported and the nearest.
    """
    architectures = hf.get("architectures") or []
    if not isinstance(architectures, list):
        raise ModelError(f"config.json: architectures must be a list, got {architectures!r}")
    for architecture in architectures:
        if architecture in _BY_ARCHITECTURE:
            return _BY_ARCHITECTURE[architecture]
    model_type = hf.get("model_type")
    if not architectures and model_type in _BY_MODEL_TYPE:
        return _BY_MODEL_TYPE[model_type]
    supported = ", ".join(_BY_ARCHITECTURE)
    if not architectures and model_type is None:
        raise ModelError(
            "config.json names neither architectures nor model_type; "
            f"supported architectures: {supported}"
        )
    found = str(architectures[0]) if architectures else f"model_type {model_type!r}"
    nearest = difflib.get_close_matches(found, list(_BY_ARCHITECTURE), n=1, cutoff=0.0)
    raise ModelError(
        f"{found} is not supported; supported architectures: {supported} (nearest: {nearest[0]})"
    )
