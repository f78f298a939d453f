"""Committed tokens of a choice to what its caller sees: text, stop strings, finish reasons.

Called by the engine for every TokenOutput. Changes only the choice's journal and detokenizer.
"""

import msgspec

from coterie.runtime.engine.choice import Choice
from coterie.runtime.messages import TokenOutput
from coterie.runtime.request import RequestOutput


class Processed(msgspec.Struct, frozen=True):
    output: RequestOutput
    stopped_early: bool
    """A stop string ended the choice; its rank does not know and must be told to drop it."""


def process(choice: Choice, news: TokenOutput) -> Processed:
    """Take over new tokens.

    The text of a token that ended the choice (EOS, stop token) is not shown, its id is. Tokens
    behind a stop string are dropped, the one that completes it is kept.
    """
    first = not choice.output_token_ids
    token_ids, logprobs = news.token_ids, news.logprobs
    finished = news.finish_reason is not None
    shown = token_ids
    if news.finish_reason == "stop" and not choice.params.include_stop_str_in_output:
        shown = token_ids[:-1]
    delta = choice.detokenizer.push(shown, finished)
    finish_reason = news.finish_reason
    stop_reason: int | str | None = news.stop_token_id
    stopped_early = False
    if delta.stop_string is not None:
        stopped_early = not finished
        finish_reason, stop_reason = "stop", delta.stop_string
        if delta.num_tokens < len(shown):
            token_ids = token_ids[: delta.num_tokens]
            logprobs = logprobs[: delta.num_tokens] if logprobs is not None else None
    choice.output_token_ids.extend(token_ids)
    return Processed(
        RequestOutput(
            request_id=choice.stream.request_id,
            index=choice.index,
            text=delta.text,
            token_ids=token_ids,
            logprobs=logprobs,
            finish_reason=finish_reason,  # type: ignore[arg-type]
            stop_reason=stop_reason,
            prompt_token_ids=choice.prompt_token_ids if first else None,
            num_prompt_tokens=len(choice.prompt_token_ids),
            num_cached_tokens=news.num_cached_tokens,
        ),
        stopped_early,
    )
