"""Server-sent events: one encoder, one reader. Lines end at newlines and at nothing else.

JSON may hold U+0085, U+2028 and U+2029 as they are, but many clients cut text there as well, as
Python's ``str.splitlines`` does. So they are sent escaped; the reader here does not depend on it.
"""

from collections.abc import AsyncIterator
from typing import Any

import msgspec

DONE = b"data: [DONE]\n\n"
_ESCAPED = (
    ("\u0085".encode(), b"\\u0085"),
    ("\u2028".encode(), b"\\u2028"),
    ("\u2029".encode(), b"\\u2029"),
)


def event(body: dict[str, Any]) -> bytes:
    """``body`` as one event."""
    data = msgspec.json.encode(body)
    for raw, escaped in _ESCAPED:
        data = data.replace(raw, escaped)
    return b"data: " + data + b"\n\n"


async def lines(chunks: AsyncIterator[str]) -> AsyncIterator[str]:
    """Text cut anywhere -> lines without their newline."""
    rest = ""
    async for chunk in chunks:
        *whole, rest = (rest + chunk).split("\n")
        for line in whole:
            yield line.removesuffix("\r")
    if rest:
        yield rest
