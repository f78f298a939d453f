"""Names users import are frozen, and each of them is there."""

import inspect

import coterie
from coterie.runtime.api.client import AsyncClient, Client

PUBLIC = [
    "LLM",
    "AsyncClient",
    "Client",
    "GenerateRequest",
    "RequestOutput",
    "SamplingParams",
    "__version__",
]
CLIENT_METHODS = {
    "abort",
    "chat",
    "close",
    "detokenize",
    "generate",
    "health",
    "models",
    "status",
    "tokenize",
}


def test_public_names() -> None:
    assert coterie.__all__ == PUBLIC
    for name in PUBLIC:
        assert getattr(coterie, name) is not None


def test_both_clients_offer_the_same() -> None:
    def methods(kind: type) -> set[str]:
        return {name for name, _ in inspect.getmembers(kind, callable) if not name.startswith("_")}

    assert methods(Client) == CLIENT_METHODS
    assert methods(AsyncClient) == CLIENT_METHODS | {"chat_stream", "generate_stream"}
