"""From logits to tokens, one row at a time: a row's token depends on its own row only.

Called by the model runner after the forward pass. Stateless: penalties are counted from the
committed tokens of each request, and randomness is a pure function of (seed, choice, output
position), so a step that is run again chooses the same tokens. Order of operations as in vLLM:
raw logprobs, min_tokens and logit_bias, penalties, temperature, min_p, top_k, top_p.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from coterie.errors import InvalidRequest, RequestError
from coterie.runtime.rank.requests import Request, SampledToken
from coterie.runtime.request import SamplingParams, TokenLogprob

_CHUNK = 256
_TOP_P_CANDIDATES = (1024, 8192)
_WORD = (1 << 64) - 1


def uniform(seed: int, choice: int, position: int) -> float:
    """A number in [0, 1) that depends on nothing but its arguments."""
    key = np.array([seed & _WORD, choice & _WORD], dtype=np.uint64)
    return float(np.random.Philox(key=key, counter=position).random_raw() >> 11) * 2.0**-53


def sample(
    logits: torch.Tensor,
    requests: Sequence[Request],
    poll: Callable[[], None] | None = None,
) -> list[SampledToken | RequestError]:
    """Choose one token per row.

    Args:
        logits: ``[num_sampled, vocab_size]`` float32. Not modified.
        requests: ``[num_sampled]``, the owner of each row.
        poll: called after every row that took time, so that nobody waits for all of them.

    Returns:
        per row the token, or the error that ends its request.
    """
    if len(requests) == 0:
        return []
    best = logits.argmax(dim=1).tolist()
    results: list[SampledToken | RequestError] = []
    for row, request in enumerate(requests):
        if _is_plain_greedy(request):
            results.append(SampledToken(best[row]))
            continue
        try:
            results.append(_sample_row(logits[row].numpy(), request))
        except InvalidRequest as error:
            results.append(error)
        if poll is not None:
            poll()
    return results


def _is_plain_greedy(request: Request) -> bool:
    params = request.params
    return (
        params.temperature == 0.0
        and params.logprobs is None
        and not params.logit_bias
        and request.num_output_tokens >= params.min_tokens
        and params.repetition_penalty == 1.0
        and params.presence_penalty == 0.0
        and params.frequency_penalty == 0.0
    )


def _sample_row(raw: np.ndarray, request: Request) -> SampledToken:
    """``raw [vocab_size]`` float32, a view that is not modified."""
    params = request.params
    logits = _constrain(raw, request)
    if params.temperature == 0.0:
        token_id = int(logits.argmax())
    else:
        position = request.num_output_tokens
        number = uniform(params.seed or 0, request.assign.choice, position)
        token_id = draw(logits / np.float32(max(params.temperature, 1e-5)), params, number)
    if not np.isfinite(logits[token_id]):
        raise InvalidRequest(
            "logit_bias and min_tokens leave no token that could be chosen", param="logit_bias"
        )
    if params.logprobs is None:
        return SampledToken(token_id)
    return SampledToken(token_id, _logprobs(raw, token_id, params.logprobs))


def _constrain(raw: np.ndarray, request: Request) -> np.ndarray:
    """Apply min_tokens, logit_bias and penalties; a copy if anything changes."""
    params = request.params
    logits = raw.copy()
    if request.num_output_tokens < params.min_tokens:
        ends = [*request.assign.eos_token_ids, *params.stop_token_ids]
        logits[ends] = -np.inf
    for token_id, bias in (params.logit_bias or {}).items():
        logits[token_id] += np.float32(bias)
    if params.repetition_penalty != 1.0:
        seen = np.unique(np.asarray(request.token_ids, dtype=np.int64))
        values = logits[seen]
        penalty = np.float32(params.repetition_penalty)
        logits[seen] = np.where(values > 0, values / penalty, values * penalty)
    if params.frequency_penalty != 0.0 or params.presence_penalty != 0.0:
        output = np.asarray(request.output_token_ids, dtype=np.int64)
        seen, counts = np.unique(output, return_counts=True)
        logits[seen] -= np.float32(params.frequency_penalty) * counts.astype(np.float32)
        logits[seen] -= np.float32(params.presence_penalty)
    return logits


def draw(scaled: np.ndarray, params: SamplingParams, number: float) -> int:
    """Inverse transform sampling of the filtered distribution.

    Args:
        scaled: ``[vocab_size]`` float32 logits divided by the temperature.
        number: uniform in [0, 1).
    """
    top_k = params.top_k if 0 < params.top_k < scaled.shape[0] else 0
    if not top_k and params.top_p >= 1.0 and params.min_p == 0.0:
        return _draw_any(scaled, number)
    highest = float(scaled.max())
    threshold = -np.inf
    if params.min_p > 0.0:
        threshold = highest + float(np.log(params.min_p))
    if top_k:
        threshold = max(threshold, _kth_largest(scaled, top_k))
    if params.top_p >= 1.0:
        ids, mass = _candidates(scaled, threshold, highest)
    else:
        ids, mass = _nucleus(scaled, threshold, highest, params.top_p)
    cumulative = np.cumsum(mass)
    index = int(np.searchsorted(cumulative, number * cumulative[-1], side="right"))
    return int(ids[min(index, len(ids) - 1)])


def _kth_largest(values: np.ndarray, k: int) -> float:
    return torch.from_numpy(values).topk(k, sorted=True).values[-1].item()


def _candidates(
    scaled: np.ndarray, threshold: float, highest: float
) -> tuple[np.ndarray, np.ndarray]:
    """Ids at or above ``threshold``, most likely first (ties by id), and their mass, float64."""
    ids = np.flatnonzero(scaled >= threshold)
    ids = ids[np.argsort(-scaled[ids], kind="stable")]
    return ids, np.exp((scaled[ids] - highest).astype(np.float64))


def _nucleus(
    scaled: np.ndarray, threshold: float, highest: float, top_p: float
) -> tuple[np.ndarray, np.ndarray]:
    """The smallest set of most likely ids whose mass reaches ``top_p`` of what passed so far.

    Sorts only as many of the likeliest as it takes to reach ``top_p``.
    """
    kept = scaled[scaled >= threshold] if threshold > -np.inf else scaled
    total = np.exp(kept - highest).sum(dtype=np.float64)
    for count in (*_TOP_P_CANDIDATES, len(kept)):
        if count > len(kept):
            continue
        least = _kth_largest(kept, count) if count < len(kept) else threshold
        ids, mass = _candidates(scaled, max(threshold, least), highest)
        if mass.sum() >= top_p * total:
            break
    before = np.cumsum(mass) - mass
    count = max(1, int(np.count_nonzero(before < top_p * total)))
    return ids[:count], mass[:count]


def _draw_any(scaled: np.ndarray, number: float) -> int:
    """Draw from the whole vocabulary in order of id, by chunks: no sort, one short cumsum."""
    size = scaled.shape[0]
    mass = np.zeros(-(-size // _CHUNK) * _CHUNK, dtype=np.float32)
    np.exp(scaled - scaled.max(), out=mass[:size])
    chunks = mass.reshape(-1, _CHUNK)
    ends = np.cumsum(chunks.sum(axis=1, dtype=np.float64))
    target = number * ends[-1]
    chunk = min(int(np.searchsorted(ends, target, side="right")), len(ends) - 1)
    inside = np.cumsum(chunks[chunk], dtype=np.float64)
    start = ends[chunk - 1] if chunk else 0.0
    offset = int(np.searchsorted(inside, target - start, side="right"))
    if offset >= _CHUNK:  # Rounding at the end of a chunk: the last token with any mass.
        offset = int(np.flatnonzero(chunks[chunk])[-1])
    return chunk * _CHUNK + offset


def _logprobs(raw: np.ndarray, token_id: int, num_top: int) -> TokenLogprob:
    """Log softmax of the raw logits: the chosen token and the ``num_top`` most likely."""
    highest = float(raw.max())
    log_total = highest + np.log(np.exp(raw - highest).sum(dtype=np.float64))
    top: list[tuple[int, float]] = []
    if num_top:
        ids, _ = _candidates(raw, _kth_largest(raw, min(num_top, raw.shape[0])), highest)
        top = [(int(i), float(raw[i] - log_total)) for i in ids[:num_top]]
    return TokenLogprob(token_id=token_id, logprob=float(raw[token_id] - log_total), top=top)
