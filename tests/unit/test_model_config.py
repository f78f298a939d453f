"""ModelConfig from config.json alone: published values of each family, and every refusal."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from coterie.attention.models.config import ModelConfig
from coterie.errors import ModelError

LLAMA_3_2_1B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
SMOLLM2_135M: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "max_position_embeddings": 8192,
    "model_type": "llama",
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 49152,
}
MIXTRAL_8X7B: dict[str, Any] = {
    "architectures": ["MixtralForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mixtral",
    "num_attention_heads": 32,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 32000,
}
QWEN3_30B_A3B: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 151643,
    "decoder_sparse_step": 1,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}
GRANITE_1B_A400M: dict[str, Any] = {
    "architectures": ["GraniteMoeForCausalLM"],
    "attention_bias": False,
    "attention_multiplier": 0.015625,
    "bos_token_id": 0,
    "embedding_multiplier": 12.0,
    "eos_token_id": 0,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "intermediate_size": 512,
    "logits_scaling": 6.0,
    "max_position_embeddings": 4096,
    "model_type": "granitemoe",
    "num_attention_heads": 16,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "residual_multiplier": 0.22,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 10000,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 49155,
}


def test_llama_3_2_with_its_rope_scaling() -> None:
    config = ModelConfig.from_dict(LLAMA_3_2_1B)
    assert (config.family, config.architecture) == ("llama", "LlamaForCausalLM")
    assert (config.num_layers, config.num_heads, config.num_kv_heads) == (16, 32, 8)
    assert config.rope_scaling is not None
    assert config.rope_scaling.factor == 32.0
    assert config.rope_theta == 500000.0
    assert config.tie_word_embeddings
    assert config.moe is None
    assert config.moe_layers == ()
    assert config.attention_scale == 64**-0.5
    assert config.kv_bytes_per_token(torch.bfloat16) == 2 * 16 * 8 * 64 * 2


def test_smollm2_derives_head_dim() -> None:
    config = ModelConfig.from_dict(SMOLLM2_135M)
    assert (config.head_dim, config.num_kv_heads, config.rope_theta) == (64, 3, 100000.0)
    assert config.rope_scaling is None
    assert config.dtype == torch.bfloat16
    assert config.eos_token_ids == (2,)
    assert config.bos_token_id == 1


def test_mixtral() -> None:
    config = ModelConfig.from_dict(MIXTRAL_8X7B)
    assert config.family == "mixtral"
    assert config.head_dim == 128
    assert config.moe is not None
    assert (config.moe.num_experts, config.moe.top_k) == (8, 2)
    assert config.moe.intermediate_size == 14336
    assert config.moe.norm_topk_prob
    assert config.moe_layers == tuple(range(32))
    assert config.rms_norm_eps == 1e-5


def test_qwen3_moe() -> None:
    config = ModelConfig.from_dict(QWEN3_30B_A3B)
    assert config.family == "qwen3_moe"
    assert config.head_dim * config.num_heads != config.hidden_size
    assert config.qk_norm
    assert config.moe is not None
    assert (config.moe.num_experts, config.moe.top_k) == (128, 8)
    assert config.moe.intermediate_size == 768
    assert config.moe.norm_topk_prob
    assert len(config.moe_layers) == 48


def test_granite_moe_multipliers() -> None:
    config = ModelConfig.from_dict(GRANITE_1B_A400M)
    assert config.family == "granite_moe"
    assert config.embedding_multiplier == 12.0
    assert config.residual_multiplier == 0.22
    assert config.attention_scale == 0.015625
    assert config.logits_scale == pytest.approx(1 / 6)
    assert config.tie_word_embeddings
    assert config.eos_token_ids == (0,)
    assert config.moe is not None
    assert (config.moe.num_experts, config.moe.top_k, config.moe.intermediate_size) == (32, 8, 512)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"mlp_only_layers": [0, 2]}, (1, 3)),
        ({"decoder_sparse_step": 2}, (1, 3)),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [3]}, (1,)),
        ({"mlp_only_layers": [0, 1, 2, 3]}, ()),
        ({"num_experts": 0}, ()),
    ],
)
def test_qwen3_moe_dense_layers(changes: dict[str, Any], expected: tuple[int, ...]) -> None:
    config = ModelConfig.from_dict(QWEN3_30B_A3B | {"num_hidden_layers": 4} | changes)
    assert config.moe_layers == expected
    assert (config.moe is None) == (expected == ())


def test_newer_transformers_keys() -> None:
    """transformers 5 writes dtype, rope_parameters and num_local_experts."""
    values = dict(QWEN3_30B_A3B)
    values["num_local_experts"] = values.pop("num_experts")
    del values["rope_theta"], values["rope_scaling"], values["torch_dtype"]
    values |= {"dtype": "float32", "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}
    config = ModelConfig.from_dict(values)
    assert config.moe is not None
    assert (config.rope_theta, config.moe.num_experts) == (5e5, 128)
    assert config.dtype == torch.float32


def test_defaults_of_absent_keys() -> None:
    values = dict(MIXTRAL_8X7B)
    for key in (
        "rope_theta",
        "torch_dtype",
        "rms_norm_eps",
        "num_key_value_heads",
        "architectures",
    ):
        del values[key]
    config = ModelConfig.from_dict(values)
    assert config.rope_theta == 1e6
    assert config.rms_norm_eps == 1e-5
    assert config.num_kv_heads == 32
    assert config.dtype == torch.float32


def test_float16_is_read_as_bfloat16() -> None:
    config = ModelConfig.from_dict(SMOLLM2_135M | {"torch_dtype": "float16"})
    assert config.dtype == torch.bfloat16


def test_generation_config_names_the_eos(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_30B_A3B))
    assert ModelConfig.from_hf(tmp_path).eos_token_ids == (151645,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [151645, 151643]}))
    assert ModelConfig.from_hf(str(tmp_path)).eos_token_ids == (151645, 151643)


def test_sliding_window_limits_the_context() -> None:
    config = ModelConfig.from_dict(MIXTRAL_8X7B | {"sliding_window": 4096})
    assert config.max_context_len == 4096
    config.check_max_model_len(4096)
    with pytest.raises(ModelError, match=r"4097 exceeds .* sliding window 4096.*4096 or less"):
        config.check_max_model_len(4097)
    with pytest.raises(ModelError, match="max_position_embeddings 32768"):
        config.check_max_model_len(32769)
    ignored = ModelConfig.from_dict(QWEN3_30B_A3B | {"sliding_window": 4096})
    assert ignored.sliding_window is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["LLamaForCausalLM"]}, "LLamaForCausalLM.*nearest: LlamaForCausalLM"),
        ({"architectures": ["Qwen2MoeForCausalLM"]}, "nearest: Qwen3MoeForCausalLM"),
        ({"architectures": None, "model_type": "gpt2"}, "gpt2.*supported architectures: Llama"),
        ({"architectures": None, "model_type": None}, "neither architectures nor model_type"),
        ({"architectures": "LlamaForCausalLM"}, "must be a list"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported, only silu"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": 570}, "hidden_size 570 must be a multiple of num_attention_heads 9"),
        ({"hidden_size": "576"}, "hidden_size must be an integer >= 1, got '576'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be an integer >= 1, got 0"),
        ({"num_hidden_layers": True}, "num_hidden_layers must be an integer"),
        ({"num_key_value_heads": 2}, "num_attention_heads 9 must be a multiple of.*2"),
        ({"head_dim": 63}, "head_dim must be even"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps must be a positive number"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false"),
        ({"torch_dtype": "float64"}, "dtype 'float64' is not supported"),
        ({"eos_token_id": 49152}, "not below vocab_size"),
        ({"eos_token_id": "</s>"}, "eos_token_id must be a token id"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "'yarn'.*default, linear, llama3"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor is missing"),
        ({"rope_scaling": [1]}, "rope parameters must be an object"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantized checkpoints"),
    ],
)
def test_refusals_say_what_to_change(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        ModelConfig.from_dict(SMOLLM2_135M | changes)


def test_top_k_above_num_experts_is_refused() -> None:
    with pytest.raises(ModelError, match="top_k must be between 1 and num_experts=8, got 9"):
        ModelConfig.from_dict(MIXTRAL_8X7B | {"num_experts_per_tok": 9})


def test_folders_that_are_no_model(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="is not a folder"):
        ModelConfig.from_hf(tmp_path / "nowhere")
    with pytest.raises(ModelError, match=r"no config\.json"):
        ModelConfig.from_hf(tmp_path)
    (tmp_path / "config.json").write_text("{broken")
    with pytest.raises(ModelError, match="cannot be read as JSON"):
        ModelConfig.from_hf(tmp_path)
    (tmp_path / "config.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ModelError, match="cannot be read as JSON"):
        ModelConfig.from_hf(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelError, match="must hold a JSON object, not a list"):
        ModelConfig.from_hf(tmp_path)
