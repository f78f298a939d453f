"""Both ends of a token's path: API, engine, ranks and how they are placed.

Owns: configuration, requests, wire messages, RPC, the engine (queue, coordinator, supervisor),
the rank process (scheduler, step loop, sampler), HTTP, SDK and CLI.
Only ``runtime.cluster`` imports ray; only ``runtime.api`` knows HTTP.
"""

if __name__ != "coterie.runtime":
    raise ImportError(
        "import coterie.runtime, not runtime: two copies of a class never compare equal"
    )
