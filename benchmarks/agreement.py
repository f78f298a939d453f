"""Greedy tokens of the demo models beside transformers, both in bfloat16.

python benchmarks/agreement.py [--model smollm2-moe] [--max-tokens 48]

Coterie keeps activations in float32 where transformers rounds each to bfloat16, so near-ties may
fall the other way. For every prompt that differs, the float32 transformers model says how near the
tie was: the gap between its two best logits there, and which side it takes itself.
"""

import argparse

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from coterie import LLM, SamplingParams
from coterie.runtime.model_store import resolve_model

PROMPTS = (
    "What is the capital of France?",
    "Name three primary colors.",
    "Write one sentence about the sea.",
    "What is 2 + 2?",
    "Who wrote Romeo and Juliet?",
    "Translate 'good morning' to Spanish.",
    "What do bees make?",
    "List the days of the week.",
    "Why is the sky blue?",
    "What is the largest planet?",
    "Give me a synonym for happy.",
    "How many legs does a spider have?",
    "What is photosynthesis?",
    "Write a haiku about autumn.",
    "What is the boiling point of water?",
    "Explain gravity to a child.",
    "What is the opposite of cold?",
    "Name a famous painter.",
    "What language is spoken in Brazil?",
    "Tell me a fun fact about cats.",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-moe")
    parser.add_argument("--max-tokens", type=int, default=48)
    args = parser.parse_args()
    torch.set_num_threads(2)
    folder = str(resolve_model(args.model))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompts = [
        list(
            tokenizer.apply_chat_template(
                [{"role": "user", "content": prompt}], add_generation_prompt=True, return_dict=False
            )
        )
        for prompt in PROMPTS
    ]
    params = SamplingParams(temperature=0, max_tokens=args.max_tokens)
    with LLM(folder, dtype="bfloat16") as llm:
        results = llm.generate(prompt_token_ids=prompts, sampling_params=params)
    ours = [list(result.outputs[0].token_ids) for result in results]
    theirs = reference(folder, prompts, args.max_tokens)
    exact = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    agree = 0
    for text, prompt, mine, other in zip(PROMPTS, prompts, ours, theirs, strict=True):
        if mine == other:
            agree += 1
            continue
        where = next(
            i for i in range(max(len(mine), len(other))) if mine[i : i + 1] != other[i : i + 1]
        )
        with torch.no_grad():
            logits = exact(torch.tensor([prompt + mine[:where]])).logits[0, -1]
        best = logits.topk(2)
        side = "ours" if mine[where : where + 1] == [int(best.indices[0])] else "theirs"
        gap = float(best.values[0] - best.values[1])
        print(f"differs at token {where}: float32 gap {gap:.3f}, float32 takes {side}: {text}")
    print(f"{args.model}: {agree} of {len(PROMPTS)} prompts agree token for token")
    print("first answer:", tokenizer.decode(ours[0], skip_special_tokens=True))


def reference(folder: str, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    outputs = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        with torch.no_grad():
            full = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=max_tokens,
                do_sample=False,
            )
        outputs.append(full[0, len(prompt) :].tolist())
    return outputs


if __name__ == "__main__":
    main()
