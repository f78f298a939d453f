"""Coterie: an actor-based, MoE-first serving runtime.

Public names are imported lazily, so that ``Client`` needs neither torch nor ray.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from coterie.runtime.api.client import AsyncClient, Client
    from coterie.runtime.api.llm import LLM
    from coterie.runtime.request import GenerateRequest, RequestOutput, SamplingParams

__version__ = "0.1.0"

_HOMES = {
    "AsyncClient": "coterie.runtime.api.client",
    "Client": "coterie.runtime.api.client",
    "GenerateRequest": "coterie.runtime.request",
    "LLM": "coterie.runtime.api.llm",
    "RequestOutput": "coterie.runtime.request",
    "SamplingParams": "coterie.runtime.request",
}

__all__ = [
    "LLM",
    "AsyncClient",
    "Client",
    "GenerateRequest",
    "RequestOutput",
    "SamplingParams",
    "__version__",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'coterie' has no attribute {name!r}")
    return getattr(import_module(home), name)
