"""Sparse upcycling: make a mixture of experts of a dense Llama folder.

Every expert starts as the dense MLP (Komatsuzaki et al. 2022, "Sparse Upcycling") plus a small
seeded perturbation; nothing is trained. Routers are seeded random directions, made orthogonal to
each layer's mean activation so that no expert is preferred for every token. The result answers
like the dense model while its tokens really are spread over experts.
Called by ``runtime.model_store.pull`` only.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from coterie.errors import CheckpointError
from coterie.runtime.demo.fetch import Progress
from coterie.runtime.demo.gguf_convert import write_json

_DENSE_TO_EXPERT = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}


@dataclass(frozen=True, kw_only=True, slots=True)
class UpcycleRecipe:
    """Everything that determines the result, besides the dense model."""

    num_experts: int = 8
    top_k: int = 2
    seed: int = 2000
    noise: float = 0.01
    """Standard deviation of the perturbation over that of the weight it perturbs."""
    router_std: float = 1.0
    """Standard deviation of the router logits over the calibration tokens."""
    layers_per_shard: int = 10
    """Decoder layers per weight file; bounds the memory needed."""


def upcycle(
    dense_dir: Path,
    out_dir: Path,
    calibration_ids: Sequence[int],
    recipe: UpcycleRecipe,
    progress: Progress,
) -> None:
    """Write a Mixtral folder into the existing ``out_dir``: weights and both config files.

    Args:
        dense_dir: LlamaForCausalLM folder with one safetensors file.
        calibration_ids: tokens of ordinary text, about 100 or more, from which the mean
            activation of each layer is taken.

    Raises:
        CheckpointError: a folder that is not such a model, or has biases, which Mixtral has not.
    """
    config = json.loads((dense_dir / "config.json").read_text())
    if config.get("attention_bias") or config.get("mlp_bias"):
        raise CheckpointError(f"{dense_dir} has biases: Mixtral has no place for them")
    num_layers = config["num_hidden_layers"]
    inputs = mlp_inputs(dense_dir, calibration_ids)
    starts = range(0, num_layers, recipe.layers_per_shard)
    weight_map: dict[str, str] = {}
    total_bytes = 0
    with safe_open(dense_dir / "model.safetensors", framework="pt") as dense:
        for number, first in enumerate(starts, start=1):
            last = min(first + recipe.layers_per_shard, num_layers)
            shard = {} if first else _outside_layers(dense)
            for layer in range(first, last):
                progress("upcycle", layer, num_layers)
                shard |= upcycle_layer(dense, layer, inputs[layer], recipe)
            file_name = f"model-{number:05d}-of-{len(starts):05d}.safetensors"
            save_file(shard, out_dir / file_name, metadata={"format": "pt"})
            weight_map |= dict.fromkeys(shard, file_name)
            total_bytes += sum(tensor.nbytes for tensor in shard.values())
    write_json(
        out_dir / "model.safetensors.index.json",
        {"metadata": {"total_size": total_bytes}, "weight_map": weight_map},
    )
    write_json(out_dir / "config.json", mixtral_config(config, recipe))
    progress("upcycle", num_layers, num_layers)


def mixtral_config(dense: dict[str, object], recipe: UpcycleRecipe) -> dict[str, object]:
    """config.json of the result; the upcycling itself is recorded under "upcycled"."""
    return {
        **{key: value for key, value in dense.items() if key not in ("attention_bias", "mlp_bias")},
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_local_experts": recipe.num_experts,
        "num_experts_per_tok": recipe.top_k,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.0,
        "router_jitter_noise": 0.0,
        "sliding_window": None,
        "upcycled": asdict(recipe),
    }


def upcycle_layer(
    dense: safe_open, layer: int, inputs: torch.Tensor, recipe: UpcycleRecipe
) -> dict[str, torch.Tensor]:
    """All tensors of one decoder layer under Mixtral's names.

    Args:
        inputs: ``[num_tokens, hidden_size]`` float32, what the dense MLP saw.
    """
    generator = torch.Generator().manual_seed(recipe.seed + layer)
    prefix = f"model.layers.{layer}."
    tensors = {}
    for name in dense.keys():  # noqa: SIM118 (safe_open is no mapping)
        if not name.startswith(prefix):
            continue
        weight = dense.get_tensor(name)
        part = name.removeprefix(prefix).split(".")
        if part[0] != "mlp":
            tensors[name] = weight
            continue
        std = recipe.noise * float(weight.float().std())
        for expert in range(recipe.num_experts):
            noise = torch.randn(weight.shape, generator=generator) * std
            key = f"{prefix}block_sparse_moe.experts.{expert}.{_DENSE_TO_EXPERT[part[1]]}.weight"
            tensors[key] = (weight.float() + noise).to(weight.dtype)
    router = router_weight(inputs, recipe, generator)
    dtype = tensors[f"{prefix}input_layernorm.weight"].dtype
    tensors[f"{prefix}block_sparse_moe.gate.weight"] = router.to(dtype)
    return tensors


def router_weight(
    inputs: torch.Tensor, recipe: UpcycleRecipe, generator: torch.Generator
) -> torch.Tensor:
    """Random router rows whose mean logit over ``inputs`` is 0 for every expert.

    Activations of a language model share one large direction; a plain random router would turn it
    into a constant preference and send nearly all tokens to the same experts.

    Returns:
        ``[num_experts, hidden_size]`` float32.
    """
    mean = inputs.mean(dim=0)
    weight = torch.randn(recipe.num_experts, inputs.shape[1], generator=generator)
    weight -= torch.outer(weight @ mean, mean) / (mean @ mean).clamp_min(1e-20)
    return weight * (recipe.router_std / (inputs @ weight.T).std().clamp_min(1e-20))


def mlp_inputs(dense_dir: Path, token_ids: Sequence[int]) -> list[torch.Tensor]:
    """Run the dense model once over ``token_ids``; what each layer's MLP saw.

    Returns:
        One ``[num_tokens - 1, hidden_size]`` float32 per layer: the first token, whose activation
        is an outlier in most models, is left out.
    """
    # Built by hand: from_pretrained would draw a progress bar of its own into ours.
    model = LlamaForCausalLM(LlamaConfig.from_pretrained(dense_dir)).float()
    loaded = model.load_state_dict(load_file(dense_dir / "model.safetensors"), strict=False)
    if loaded.unexpected_keys or set(loaded.missing_keys) - {"lm_head.weight"}:
        raise CheckpointError(f"{dense_dir} does not hold the tensors of a Llama model: {loaded}")
    seen: list[torch.Tensor] = []
    for layer in model.model.layers:
        layer.mlp.register_forward_pre_hook(lambda _, args: seen.append(args[0][0, 1:].clone()))
    with torch.inference_mode():
        model(torch.tensor([list(token_ids)]), use_cache=False)
    return seen


def _outside_layers(dense: safe_open) -> dict[str, torch.Tensor]:
    names: Iterator[str] = (n for n in dense.keys() if not n.startswith("model.layers."))  # noqa: SIM118
    return {name: dense.get_tensor(name) for name in names}
