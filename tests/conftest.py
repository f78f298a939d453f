"""Shared fixtures: one compute thread, fixed seeds, tiny real models and a byte tokenizer.

Tiny models are random Hugging Face models written with ``save_pretrained``; nothing is downloaded.
Folders are cached for the session: treat them as read-only, copy one before changing it.
"""

import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import pytest
import torch

torch.set_num_threads(1)

SPECIAL_TOKENS = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")
"""Ids 256, 257, 258, 259; ids 0..255 are the bytes themselves."""
VOCAB_SIZE = 261
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

TinyModelDir = Callable[..., Path]


@pytest.fixture(autouse=True)
def fixed_seeds() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


def _byte_characters() -> list[str]:
    """The printable stand-in of each byte that byte-level BPE works on (GPT-2's table)."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    shifted = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(shifted)) for byte in range(256)]


def _write_byte_tokenizer(model_dir: Path, add_bos: bool = False) -> Path:
    from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers, processors
    from tokenizers.models import BPE

    vocab = {character: byte for byte, character in enumerate(_byte_characters())}
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(t, special=True, normalized=False) for t in SPECIAL_TOKENS]
    )
    if add_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 256)]
        )
    model_dir.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(model_dir / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 512,
        "chat_template": CHAT_TEMPLATE,
    }
    (model_dir / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))
    return model_dir


@pytest.fixture(scope="session")
def write_byte_tokenizer() -> Callable[..., Path]:
    """``write_byte_tokenizer(model_dir, add_bos=False) -> model_dir``.

    A byte-level tokenizer without merges (id of a byte = the byte, specials from 256) with a ChatML
    template.
    """
    return _write_byte_tokenizer


def _tiny_config(family: str, overrides: dict[str, Any]) -> tuple[Any, type]:
    """Hugging Face config and model class of a two-layer model."""
    import transformers

    common: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        # Wide enough that logits differ clearly: greedy choices must not hang on rounding.
        "initializer_range": 0.15,
        "bos_token_id": 256,
        "eos_token_id": 257,
    }
    moe: dict[str, Any] = {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "intermediate_size": 32,
    }
    families: dict[str, tuple[str, dict[str, Any]]] = {
        "llama": ("Llama", {}),
        "mixtral": ("Mixtral", moe),
        "qwen3_moe": (
            "Qwen3Moe",
            {
                "num_experts": 4,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 32,
                "head_dim": 24,
                "norm_topk_prob": True,
            },
        ),
        "granite_moe": (
            "GraniteMoe",
            moe
            | {
                "embedding_multiplier": 6.0,
                "residual_multiplier": 0.4,
                "attention_multiplier": 0.2,
                "logits_scaling": 1.5,
            },
        ),
    }
    name, own = families[family]
    config = getattr(transformers, f"{name}Config")(**(common | own | overrides))
    return config, getattr(transformers, f"{name}ForCausalLM")


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> TinyModelDir:
    """``tiny_model_dir(family, *, dtype="float32", seed=0, **config_overrides) -> Path``.

    ``family`` is llama, mixtral, qwen3_moe or granite_moe; overrides are Hugging Face config keys.
    Norm weights and biases are random too, so that a forgotten one shows. Comes with the byte
    tokenizer. Cached per argument set.
    """
    cache: dict[str, Path] = {}

    def build(family: str, *, dtype: str = "float32", seed: int = 0, **overrides: Any) -> Path:
        key = json.dumps([family, dtype, seed, overrides], sort_keys=True)
        if key in cache:
            return cache[key]
        config, model_class = _tiny_config(family, overrides)
        with torch.random.fork_rng(), torch.no_grad():
            torch.manual_seed(seed)
            model = model_class(config)
            for name, parameter in model.named_parameters():
                if "norm" in name or name.endswith("bias"):
                    parameter.add_(0.2 * torch.randn_like(parameter))
        model_dir = tmp_path_factory.mktemp(f"tiny-{family}-")
        model.to(getattr(torch, dtype)).save_pretrained(model_dir)
        cache[key] = _write_byte_tokenizer(model_dir)
        return model_dir

    return build


@pytest.fixture(scope="session")
def hf_model() -> Callable[[Path], Any]:
    """``hf_model(model_dir)``: the folder as a float32 transformers model, for parity. Cached."""
    cache: dict[Path, Any] = {}

    def load(model_dir: Path) -> Any:
        if model_dir not in cache:
            from transformers import AutoModelForCausalLM

            cache[model_dir] = AutoModelForCausalLM.from_pretrained(
                model_dir, dtype=torch.float32, attn_implementation="eager"
            ).eval()
        return cache[model_dir]

    return load
