"""A request as the scheduler sees it, and when it ends. No torch."""

from dataclasses import dataclass, field

from coterie.runtime.messages import Assign
from coterie.runtime.request import SamplingParams, TokenLogprob


@dataclass(eq=False, slots=True)
class Request:
    """Mutable state of one bound request; changed by the scheduler only, tokens only at commit."""

    assign: Assign
    arrival: int
    """Order of binding; a smaller one is older."""
    token_ids: list[int]
    """Prompt, then committed output."""
    num_computed_tokens: int = 0
    """Tokens whose KV is committed."""
    blocks: list[int] = field(default_factory=list)
    """KV blocks by position; may reach beyond num_computed_tokens."""
    block_hashes: list[bytes] = field(default_factory=list)
    """Hashes of the committed full blocks."""
    num_cached_tokens: int | None = None
    """Prompt tokens found in the prefix cache at first admission; None before it."""

    @property
    def request_id(self) -> str:
        return self.assign.request_id

    @property
    def params(self) -> SamplingParams:
        return self.assign.sampling_params

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.assign.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]


@dataclass(frozen=True, slots=True)
class SampledToken:
    """What the sampler chose for one row."""

    token_id: int
    logprobs: TokenLogprob | None = None


@dataclass(frozen=True, slots=True)
class Finish:
    reason: str
    """stop or length."""
    stop_token_id: int | None = None
    """The member of stop_token_ids that matched; None for EOS and length."""


def check_finish(request: Request, max_total_tokens: int) -> Finish | None:
    """Whether the request ends with the token that was appended last."""
    params = request.params
    token_id = request.token_ids[-1]
    if request.num_output_tokens >= params.min_tokens:
        if not params.ignore_eos and token_id in request.assign.eos_token_ids:
            return Finish("stop")
        if token_id in params.stop_token_ids:
            return Finish("stop", token_id)
    if params.max_tokens is not None and request.num_output_tokens >= params.max_tokens:
        return Finish("length")
    if len(request.token_ids) >= max_total_tokens:
        return Finish("length")
    return None
