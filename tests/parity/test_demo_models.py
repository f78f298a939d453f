"""Both demo models answer through transformers and through Coterie. Needs `coterie pull`."""

from pathlib import Path
from typing import Any

import pytest
import torch

from coterie.errors import ConfigError
from coterie.runtime.model_store import DEMO_MODELS, MOE_NAME, resolve_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

CAPITAL = [{"role": "user", "content": "What is the capital of France?"}]
GREEDY_TOKENS = 24


@pytest.fixture(scope="module", params=DEMO_MODELS)
def demo_folder(request: pytest.FixtureRequest) -> Path:
    try:
        return resolve_model(request.param)
    except ConfigError as error:
        pytest.skip(str(error))


def load_with_transformers(folder: Path) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    return model, AutoTokenizer.from_pretrained(folder)


def test_answers_paris_through_transformers(demo_folder: Path) -> None:
    model, tokenizer = load_with_transformers(demo_folder)
    expected = "MixtralForCausalLM" if demo_folder.name == MOE_NAME else "LlamaForCausalLM"
    assert type(model).__name__ == expected
    inputs = tokenizer.apply_chat_template(
        CAPITAL, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    output = model.generate(**inputs, max_new_tokens=GREEDY_TOKENS, do_sample=False)
    answer = output[0, inputs["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(answer)
    assert answer[-1] == tokenizer.convert_tokens_to_ids("<|im_end|>")


def test_answers_paris_through_coterie(demo_folder: Path) -> None:
    from coterie import LLM, SamplingParams

    with LLM(str(demo_folder), max_model_len=512) as llm:
        params = SamplingParams(temperature=0, max_tokens=GREEDY_TOKENS)
        [result] = llm.chat(CAPITAL, params)
    assert "Paris" in result.outputs[0].text
    assert result.outputs[0].finish_reason == "stop"


def test_tokenizer_of_the_demo_models(demo_folder: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(demo_folder)
    assert tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_start|>", "<|im_end|>"]) == [
        0,
        1,
        2,
    ]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    assert tokenizer("Hello world").input_ids == [19556, 905]
    assert len(tokenizer("20291129").input_ids) == 8, "digits are split one by one"
    for text in (
        "Hello world 2024, don't!",
        "na\u00efve caf\u00e9 \u65e5\u672c\u8a9e \U0001f389  x\n\n\tfoo",
        "<|im_start|>user\nhi<|im_end|>",
    ):
        assert tokenizer.decode(tokenizer(text).input_ids) == text
    rendered = tokenizer.apply_chat_template(CAPITAL, add_generation_prompt=True, tokenize=False)
    assert rendered.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert rendered.endswith("<|im_start|>assistant\n")


def test_tokens_spread_over_the_experts() -> None:
    """Held-out text: in every layer each expert gets some tokens and none gets most of them."""
    try:
        folder = resolve_model(MOE_NAME)
    except ConfigError as error:
        pytest.skip(str(error))
    model, tokenizer = load_with_transformers(folder)
    text = (
        "World War II began in 1939. Cats are small carnivorous mammals, kept as pets. To install "
        "it, run pip install foo and then import foo in Python. The stock market fell 3.2% on "
        "Monday as investors worried about inflation. SELECT name FROM users WHERE age > 30; "
        "for i in range(10): print(i * i)"
    )
    ids = tokenizer(text, return_tensors="pt").input_ids
    with torch.inference_mode():
        layers = model(ids, output_router_logits=True).router_logits
    for layer in layers:
        share = torch.bincount(layer.topk(2).indices.flatten(), minlength=8) / (2 * ids.numel())
        assert share.min() > 0.01
        assert share.max() < 0.4
