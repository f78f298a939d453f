"""``coterie generate``: complete prompts with an engine of its own; results alone on stdout."""

import argparse
import json
from typing import IO, Any

from coterie.errors import ConfigError
from coterie.runtime.api.cli_flags import engine_flags
from coterie.runtime.api.cli_output import StartProgress, clean_stdout
from coterie.runtime.api.llm import LLM
from coterie.runtime.request import SamplingParams

Prompt = str | list[int]


def run(args: argparse.Namespace) -> int:
    if not args.prompts:
        raise ConfigError("give at least one --prompt or --prompt-token-ids")
    params = sampling_params(args)
    with clean_stdout() as results:
        with StartProgress() as progress:
            llm = LLM(**engine_flags(args, backend="mp"), progress=progress)
        with llm:
            for result in _generate(llm, args, params):
                _write(results, result, args.json)
    return 0


def sampling_params(args: argparse.Namespace) -> SamplingParams:
    return SamplingParams(
        n=args.n,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        min_p=args.min_p,
        repetition_penalty=args.repetition_penalty,
        seed=args.sampling_seed if args.sampling_seed is not None else getattr(args, "seed", None),
        max_tokens=args.max_tokens,
        min_tokens=args.min_tokens,
        stop=tuple(args.stop),
        stop_token_ids=tuple(args.stop_token_ids),
        ignore_eos=args.ignore_eos,
        logprobs=args.logprobs,
    )


def _generate(llm: LLM, args: argparse.Namespace, params: SamplingParams) -> Any:
    """Results in prompt order."""
    prompts: list[Prompt] = args.prompts
    if args.chat:
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        if len(texts) != len(prompts):
            raise ConfigError("--chat takes --prompt only, not --prompt-token-ids")
        return llm.chat([[{"role": "user", "content": text}] for text in texts], params)
    return llm.generate(prompts, sampling_params=params)


def _write(results: IO[str], result: Any, as_json: bool) -> None:
    for choice in result.outputs:
        if as_json:
            line = {
                "prompt_token_ids": list(result.prompt_token_ids),
                "token_ids": choice.token_ids,
                "text": choice.text,
                "finish_reason": choice.finish_reason,
            }
            if choice.logprobs is not None:
                line["logprobs"] = [
                    {"token_id": entry.token_id, "logprob": entry.logprob, "top": entry.top}
                    for entry in choice.logprobs
                ]
            results.write(json.dumps(line) + "\n")
        else:
            results.write(choice.text + "\n")
    results.flush()
