"""Fields of OpenAI, vLLM and SGLang requests that would change the answer and are not built.

Requests that use one are refused by name; the values that ask for nothing (null, false, empty, and
what the table adds) pass. Fields that nobody knows are ignored, as OpenAI's own server does.
"""

from collections.abc import Mapping
from typing import Any

from coterie.errors import InvalidRequest

NEUTRAL: dict[str, tuple[Any, ...]] = {
    # structured output
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "structured_outputs": (),
    "structural_tag": (),
    "json_schema": (),
    "regex": (),
    "ebnf": (),
    # sampling
    "use_beam_search": (),
    "length_penalty": (1.0,),
    "early_stopping": (),
    "allowed_token_ids": (),
    "bad_words": (),
    "logits_processors": (),
    "custom_logit_processor": (),
    "custom_params": (),
    "thinking_token_budget": (),
    "repetition_detection": (),
    "vllm_xargs": (),
    "stop_regex": (),
    "no_stop_trim": (),
    # the prompt
    "truncate_prompt_tokens": (),
    "prompt_embeds": (),
    "input_embeds": (),
    "mm_processor_kwargs": (),
    # the answer
    "prompt_logprobs": (),
    "return_tokens_as_token_ids": (),
    "return_hidden_states": (),
    # where and when it runs
    "lora_request": (),
    "lora_path": (),
    "kv_transfer_params": (),
    "cache_salt": (),
    "priority": (0,),
}
"""Field -> values that ask for nothing, beside null, false and empty ones."""

COMPLETION_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "max_completion_tokens": (),
    "top_logprobs": (),
    "messages": (),
    "tools": (),
    "chat_template": (),
    "chat_template_kwargs": (),
}
"""For /v1/completions alone."""

CHAT_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "echo": (),
    "suffix": (),
    "prompt": (),
    "best_of": (1,),
    "continue_final_message": (),
    "chat_template": (),
    "documents": (),
    "reasoning_effort": ("none",),
    "reasoning": (),
    "verbosity": ("medium",),
    "prediction": (),
    "web_search_options": (),
    "function_call": ("none", "auto"),
    "media_io_kwargs": (),
}
"""For /v1/chat/completions alone."""


def refuse_unsupported(extra: Mapping[str, Any], own: Mapping[str, tuple[Any, ...]]) -> None:
    """Refuse fields that ask for what is not built.

    Args:
        extra: fields of a request that its model does not have.
        own: the endpoint's own table beside ``NEUTRAL``.

    Raises:
        InvalidRequest: names the field.
    """
    table = {**NEUTRAL, **own}
    for name, value in extra.items():
        if name in table and not _asks_for_nothing(value, table[name]):
            raise InvalidRequest(f"{name} is not supported; leave it out", name)


def _asks_for_nothing(value: Any, neutral: tuple[Any, ...]) -> bool:
    if value is None or value is False or value in ("", [], {}):
        return True
    return not isinstance(value, bool) and value in neutral
