"""``coterie generate``: complete prompts with an engine of its own; results alone on stdout."""

import argparse
import json
from typing import IO, Any

from coterie.attention.models.config import ModelConfig
from coterie.errors import ConfigError
from coterie.runtime.api.cli_flags import engine_flags
from coterie.runtime.api.cli_output import StartProgress, clean_stdout
from coterie.runtime.api.llm import LLM
from coterie.runtime.config import EngineConfig
from coterie.runtime.engine.plan import find_tokenizer
from coterie.runtime.engine_args import engine_config_from_flags
from coterie.runtime.model_store import resolve_model
from coterie.runtime.request import SamplingParams, check_token_ids

Prompt = str | list[int]


def run(args: argparse.Namespace) -> int:
    if not args.prompts:
        raise ConfigError("give at least one --prompt or --prompt-token-ids")
    params, flags = sampling_params(args), engine_flags(args)
    check(args, params, engine_config_from_flags(**flags))
    with clean_stdout() as results:
        with StartProgress() as progress:
            llm = LLM(**flags, progress=progress)
        with llm:
            for result in _generate(llm, args, params):
                _write(results, result, args.json)
    return 0


def check(args: argparse.Namespace, params: SamplingParams, config: EngineConfig) -> None:
    """Refuse before the model is loaded what could not run once it is.

    Raises:
        ConfigError, InvalidRequest: says which flag.
    """
    params.check_ranges()
    texts = [prompt for prompt in args.prompts if isinstance(prompt, str)]
    if args.chat and len(texts) != len(args.prompts):
        raise ConfigError("--chat takes --prompt only, not --prompt-token-ids")
    if not all(texts):
        raise ConfigError("--prompt must not be empty")
    model_dir = resolve_model(config.model.model)
    if (texts or params.stop) and find_tokenizer(config.model, model_dir) is None:
        raise ConfigError("without a tokenizer give --prompt-token-ids, and no --prompt or --stop")
    vocab_size = ModelConfig.from_hf(model_dir).vocab_size
    params.validate(vocab_size)
    for prompt in args.prompts:
        if not isinstance(prompt, str):
            check_token_ids("--prompt-token-ids", prompt, vocab_size)


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
        return llm.chat([[{"role": "user", "content": text}] for text in prompts], params)
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
