"""One choice of one request: the unit that waits, is bound to a rank and is streamed.

A request with n > 1 becomes n choices with ids of their own. The token ids here are the engine's
journal: prompt plus emitted tokens are all that is needed to run the choice again elsewhere.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from coterie.runtime.detokenizer import Detokenizer
from coterie.runtime.engine.request_stream import RequestStream
from coterie.runtime.messages import Assign
from coterie.runtime.request import SamplingParams


@dataclass(slots=True, eq=False)
class Choice:
    """Mutable state of one choice."""

    choice_id: str
    index: int
    prompt_token_ids: list[int]
    params: SamplingParams
    """n is 1; seed and max_tokens are set."""
    eos_token_ids: list[int]
    detokenizer: Detokenizer
    stream: RequestStream
    block_hashes: Sequence[bytes] = ()
    """Of the prompt's full blocks; empty without prefix caching."""
    wanted_seat: int | None = None
    """The attention rank that serves it as long as it lives; None: any."""
    output_token_ids: list[int] = field(default_factory=list)
    seat: int | None = None
    """The attention rank it is bound to; None while it waits."""
    num_skipped: int = 0
    """How often a later choice was bound before this one."""

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    def assign(self) -> Assign:
        """The message that binds it."""
        return Assign(
            request_id=self.choice_id,
            prompt_token_ids=self.prompt_token_ids,
            output_token_ids=self.output_token_ids,
            sampling_params=self.params,
            choice=self.index,
            eos_token_ids=self.eos_token_ids,
        )
