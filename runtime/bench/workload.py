"""What a benchmark sends and when: prompts and arrival times, from one seed."""

import json
import random
from dataclasses import dataclass
from pathlib import Path

from coterie.errors import ConfigError

Prompt = str | list[int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """Requests of one concurrency level.

    Attributes:
        prompts: text or token ids, one a request.
        output_len: tokens asked for.
        arrivals_s: seconds from the start before which a request is not sent.
    """

    prompts: list[Prompt]
    output_len: int
    arrivals_s: list[float]
    ignore_eos: bool
    temperature: float


def random_prompts(count: int, input_len: int, vocab_size: int, seed: int) -> list[Prompt]:
    """Prompts of random token ids; no two begin alike, so the prefix cache does not help."""
    if vocab_size < 2:
        raise ConfigError("a random prompt needs a vocabulary of at least 2 tokens")
    rng = random.Random(seed)
    return [[rng.randrange(vocab_size) for _ in range(input_len)] for _ in range(count)]


def prompts_from_file(path: str, count: int) -> list[Prompt]:
    """The first ``count`` prompts of a file, repeated if it has fewer.

    A line is text, a JSON string, or a JSON object with ``prompt`` or ``prompt_token_ids``.

    Raises:
        ConfigError: the file cannot be read or holds no prompt.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read --prompts-file {path}: {error}") from error
    prompts = [_prompt(line) for line in lines if line.strip()]
    if not prompts:
        raise ConfigError(f"--prompts-file {path} holds no prompt")
    return [prompts[index % len(prompts)] for index in range(count)]


def _prompt(line: str) -> Prompt:
    if line.lstrip()[:1] not in ("{", '"'):
        return line
    try:
        value = json.loads(line)
    except ValueError:
        return line
    if isinstance(value, dict):
        value = value.get("prompt_token_ids", value.get("prompt"))
    if isinstance(value, str) or (isinstance(value, list) and value):
        return value
    raise ConfigError(f"no prompt in the line {line[:60]!r}")


def arrivals(count: int, rate: float | None, seed: int) -> list[float]:
    """Poisson arrival times at ``rate`` a second; all at once without one."""
    if rate is None:
        return [0.0] * count
    if rate <= 0:
        raise ConfigError("--request-rate must be positive")
    rng = random.Random(seed)
    times, now = [], 0.0
    for _ in range(count):
        now += rng.expovariate(rate)
        times.append(now)
    return times
