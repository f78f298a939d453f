"""Bodies of the OpenAI routes: which fields are refused, by what name, and which are ignored."""

from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from coterie.runtime.api import unsupported
from coterie.runtime.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def http(scripted_server: Any) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=scripted_server.url, timeout=20) as client:
        yield client


CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}


@pytest.mark.parametrize(
    ("path", "change", "param"),
    [
        ("completions", {"prompt": 5}, "prompt"),
        ("completions", {"prompt": []}, "prompt"),
        ("completions", {"prompt": [[1], []]}, "prompt"),
        ("completions", {"prompt": [1, -1]}, None),
        ("completions", {"max_tokens": "16"}, "max_tokens"),
        ("completions", {"max_tokens": 0}, "max_tokens"),
        ("completions", {"temperature": "hot"}, "temperature"),
        ("completions", {"temperature": -1}, "temperature"),
        ("completions", {"top_p": 0}, "top_p"),
        ("completions", {"n": 0}, "n"),
        ("completions", {"logprobs": 21}, "logprobs"),
        ("completions", {"logprobs": 1, "echo": True}, "echo"),
        ("completions", {"suffix": "x"}, "suffix"),
        ("completions", {"best_of": 2}, "best_of"),
        ("completions", {"logit_bias": {"a": 1}}, "logit_bias"),
        ("completions", {"logit_bias": {"1": 101}}, "logit_bias"),
        ("completions", {"logit_bias": {"999999": 1}}, "logit_bias"),
        ("completions", {"stop": [""]}, "stop"),
        ("completions", {"stream": "yes"}, "stream"),
        ("completions", {"stream_options": {"include_usage": True}}, "stream_options"),
        ("completions", {"deadline_s": 0}, "deadline_s"),
        ("chat/completions", {"messages": []}, "messages"),
        ("chat/completions", {"messages": [{"role": "king", "content": "x"}]}, "messages.0.role"),
        ("chat/completions", {"messages": [{"role": "user"}]}, "messages[0].content"),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content",
        ),
        ("chat/completions", {"tools": [{"type": "function"}]}, "tools"),
        ("chat/completions", {"tool_choice": "required"}, "tool_choice"),
        ("chat/completions", {"response_format": {"type": "json_object"}}, "response_format"),
        ("chat/completions", {"top_logprobs": 2}, "top_logprobs"),
        ("chat/completions", {"chat_template_kwargs": {"tokenize": 1}}, "chat_template_kwargs"),
        (
            "chat/completions",
            {"chat_template_kwargs": {"add_special_tokens": True}},
            "chat_template_kwargs",
        ),
    ],
)
def test_bad_requests(http: httpx.Client, path: str, change: dict[str, Any], param: Any) -> None:
    body = ({"prompt": "x"} if path == "completions" else CHAT) | change
    reply = http.post(f"/v1/{path}", json=body)
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    if param is not None:
        assert error["param"] == param


UNSUPPORTED: dict[str, Any] = {
    "guided_json": {"type": "object"},
    "guided_regex": "a+",
    "guided_choice": ["a", "b"],
    "guided_grammar": "root ::= 'a'",
    "structured_outputs": {"choice": ["a"]},
    "regex": "a+",
    "lora_request": {"name": "x"},
    "use_beam_search": True,
    "prompt_logprobs": 0,
    "allowed_token_ids": [1],
    "bad_words": ["x"],
    "truncate_prompt_tokens": -1,
    "length_penalty": 0.5,
    "prompt_embeds": "AAAA",
    "kv_transfer_params": {"do_remote_decode": True},
    "priority": 1,
    "logits_processors": ["x"],
    "return_tokens_as_token_ids": True,
}
CHAT_UNSUPPORTED: dict[str, Any] = {
    "echo": True,
    "continue_final_message": True,
    "chat_template": "{{ messages }}",
    "reasoning_effort": "high",
    "prediction": {"type": "content", "content": "x"},
    "web_search_options": {"search_context_size": "low"},
    "documents": [{"text": "x"}],
    "function_call": {"name": "f"},
    "best_of": 2,
    "audio": {"voice": "x"},
}


@pytest.mark.parametrize("field", [*UNSUPPORTED, *CHAT_UNSUPPORTED])
def test_known_fields_that_are_not_built_are_refused(http: httpx.Client, field: str) -> None:
    value = (UNSUPPORTED | CHAT_UNSUPPORTED)[field]
    bodies = {"chat/completions": CHAT}
    if field in UNSUPPORTED:
        bodies["completions"] = {"prompt": "x"}
    for path, body in bodies.items():
        reply = http.post(f"/v1/{path}", json=body | {field: value})
        assert reply.status_code == 400, (path, field)
        error = reply.json()["error"]
        assert error["param"] == ("modalities" if field == "audio" else field)


def test_values_that_ask_for_nothing_are_accepted(http: httpx.Client) -> None:
    nothing = dict.fromkeys([*unsupported.NEUTRAL, *unsupported.CHAT_NEUTRAL])
    assert http.post("/v1/chat/completions", json=CHAT | nothing).status_code == 200
    defaults = {
        "priority": 0,
        "length_penalty": 1.0,
        "use_beam_search": False,
        "bad_words": [],
        "best_of": 1,
        "reasoning_effort": "none",
        "modalities": ["text"],
        "echo": False,
    }
    assert http.post("/v1/chat/completions", json=CHAT | defaults).status_code == 200
    unknown = {"prompt": "x", "no_such_field": 5, "priority": None, "guided_json": None}
    assert http.post("/v1/completions", json=unknown).status_code == 200


@pytest.mark.parametrize("prompt", [[1.5], [-1], [[-1]], [True], {"a": 1}, [None], None])
def test_a_wrong_prompt_names_the_forms(http: httpx.Client, prompt: Any) -> None:
    error = http.post("/v1/completions", json={"prompt": prompt}).json()["error"]
    assert error["param"] == "prompt"
    for form in ("text", "list of texts", "list of token ids"):
        assert form in error["message"]


def test_text_parts_need_text(http: httpx.Client) -> None:
    body = CHAT | {"messages": [{"role": "user", "content": [{"type": "text"}]}]}
    error = http.post("/v1/chat/completions", json=body).json()["error"]
    assert error["message"] == "a content part of type 'text' needs text"


def test_harmless_extras_are_accepted(http: httpx.Client) -> None:
    body = CHAT | {
        "unknown": {"a": 1},
        "tools": [{"type": "function"}],
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "temperature": None,
        "user": "me",
    }
    assert http.post("/v1/chat/completions", json=body).status_code == 200
    assert http.post("/v1/completions", json={"prompt": "x", "best_of": 1}).status_code == 200


@pytest.mark.parametrize(
    ("content", "media_type"),
    [
        (b"{", "application/json"),
        (b"[]", "application/json"),
        (b"\xff\xfe", "application/json"),
        (b'{"prompt": "x"}', "text/plain"),
        (b"prompt=x", "application/x-www-form-urlencoded"),
    ],
)
def test_bodies_that_are_not_json(http: httpx.Client, content: bytes, media_type: str) -> None:
    reply = http.post("/v1/completions", content=content, headers={"content-type": media_type})
    assert reply.status_code == 400
    assert reply.json()["error"]["type"] == "invalid_request_error"


def test_add_special_tokens(
    write_byte_tokenizer: Callable[..., Any],
    tmp_path: Any,
    server_over: Callable[..., Any],
    scripted_server: Any,
) -> None:
    tokenizer = Tokenizer.load(write_byte_tokenizer(tmp_path, add_bos=True))

    async def make() -> Any:
        return type(scripted_server.engine)(tokenizer)

    def first(client: httpx.Client, path: str, body: dict[str, Any], add: bool | None) -> int:
        asked = body | {"max_tokens": 1, "return_token_ids": True, "add_special_tokens": add}
        reply = client.post(f"/v1/{path}", json=asked).json()
        ids = reply.get("prompt_token_ids") or reply["choices"][0]["prompt_token_ids"]
        return int(ids[0])

    with server_over(make) as server, httpx.Client(base_url=server.url) as client:
        for add, wanted in ((None, 256), (True, 256), (False, ord("x"))):
            assert first(client, "completions", {"prompt": "x"}, add) == wanted
        for add, wanted in ((None, 258), (False, 258), (True, 256)):
            assert first(client, "chat/completions", CHAT, add) == wanted
