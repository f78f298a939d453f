"""Events survive every client that cuts lines, and every way the network cuts text."""

import json
from collections.abc import AsyncIterator

from coterie.runtime.sse import event, lines

TEXT = "a\u0085b\u2028c\u2029d\r\n\x1ce \U0001f600"


def test_an_event_is_one_line_for_str_splitlines() -> None:
    first, second = event({"text": TEXT}).decode().splitlines()
    assert json.loads(first.removeprefix("data: ")) == {"text": TEXT}
    assert second == ""


async def test_lines_end_at_newlines_only() -> None:
    raw = 'data: {"text": "x\u2028y\u0085z"}\r\n\ndata: [DONE]\n\ntail'
    for size in (1, 3, 100):

        async def chunks(size: int = size) -> AsyncIterator[str]:
            for start in range(0, len(raw), size):
                yield raw[start : start + size]

        found = [line async for line in lines(chunks())]
        assert found == ['data: {"text": "x\u2028y\u0085z"}', "", "data: [DONE]", "", "tail"]
