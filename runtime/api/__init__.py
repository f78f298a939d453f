"""Front doors: HTTP, RPC service, SDK client, offline LLM, CLI."""
