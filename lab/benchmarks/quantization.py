"""What 8-bit numbers (``--quantization w8a8``) do to a model's answers, beside the type that it runs in without.

All layers are quantized, whether that is faster or not, but for the logits. Every position of some sequences is
computed both ways, in one chunk each: how often the most likely token is the same, how far the logits are from those in
float32, and the perplexity of the tokens that are there. Sequences are chats with the embedded model's right answers,
of which only the answers count, or random tokens (for the 111M model, whose text is noise); perplexity says something
of the first only. Then the embedded model's skills: exact answers to held-out questions.

    python -m lab.benchmarks.quantization [--model 111m] [--sequences 64] [--skills 20]

Prints tables, then one JSON line.
"""

import argparse
import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from benchmarks.common import EMBEDDED, model_111m, print_table, random_prompts, vocab_size
from lab.benchmarks.cpu_kernels import BLOCK_SIZE, Steps
from neaptide.data import skills, structured_skills
from neaptide.executors.torch.layers.linear import quantize
from neaptide.kernels.paged_attention import StepTables
from neaptide.kernels.row_quantization import row_quantizer
from neaptide.server.text.tokenizer import Tokenizer

LEAST_TOKENS, MOST_TOKENS = 128, 256
"""Lengths of a random sequence."""
EXACT, PLAIN, QUANTIZED = "float32", "without", "w8a8"


class Text(NamedTuple):
    tokens: list[int]
    first: int
    """Token from which on predictions count."""


class Computed(NamedTuple):
    """Results of one way, over all predictions that count."""

    logits: Tensor
    """[predictions, vocabulary] fp32."""
    targets: Tensor
    """[predictions] the tokens that are there."""


def logits_of(steps: Steps, tokens: Sequence[int]) -> Tensor:
    """[tokens, vocabulary] fp32, of one chunk."""
    runner, count = steps.executor._runner, len(tokens)
    table = np.arange(-(-count // BLOCK_SIZE)).reshape(1, -1)
    with torch.inference_mode():
        plan = runner.plan_attention(np.array([count]), np.array([count]), StepTables.of(table))
        hidden = runner.model.forward(torch.tensor(tokens), torch.arange(count), runner.kv_cache, plan)
        return runner.model.logits(hidden)


def computed(steps: Steps, sequences: Sequence[Text]) -> Computed:
    logits = [logits_of(steps, each.tokens)[each.first - 1 : -1] for each in sequences]
    targets = [torch.tensor(each.tokens[each.first :]) for each in sequences]
    return Computed(torch.cat(logits), torch.cat(targets))


def ways(model: Path, dtype: str, threads: int) -> dict[str, Steps]:
    """The ways to compute. The exact one and the one without quantization show the difference of the type, the last two
    that of the numbers."""
    found = {EXACT: Steps(model, "torch", "float32", threads)}
    found |= {name: Steps(model, "torch", dtype, threads) for name in (PLAIN, QUANTIZED)}
    with torch.inference_mode():
        quantize(found[QUANTIZED].executor._runner.model.linears(), row_quantizer())
    return found


def differences(by_way: dict[str, Computed]) -> dict[str, dict[str, float | None]]:
    """Differences of each way: its perplexity, and compared with the exact one the fraction of equal most likely
    tokens, the same over tokens of which the exact one is sure (a gap of 1 to the second), and the root mean square
    error of the log-probabilities."""
    exact = by_way[EXACT].logits
    best = exact.topk(2).values
    is_sure = best[:, 0] - best[:, 1] > 1.0
    found = {}
    for name, (logits, targets) in by_way.items():
        logprobs = logits.log_softmax(dim=-1)
        same = logits.argmax(dim=-1) == exact.argmax(dim=-1)
        found[name] = {
            "perplexity": math.exp(-float(logprobs.gather(1, targets.unsqueeze(1)).mean())),
            "same_token": float(same.double().mean()),
            "same_token_where_sure": float(same[is_sure].double().mean()) if is_sure.any() else None,
            "rms": float((logprobs - exact.log_softmax(dim=-1)).square().mean().sqrt()),
        }
    return found


def chats(tokenizer: Tokenizer, count: int, seed: int) -> list[Text]:
    """Held-out questions of every skill in turn, with their right answers."""
    found = []
    for index in range(count):
        skill = structured_skills.ALL[index % len(structured_skills.ALL)]
        example = structured_skills.single(skill, random.Random(f"{skill}/{seed}/{index}"), held_out=True)
        prompt = prompt_of(tokenizer, example)
        found.append(Text([*prompt, *tokenizer.encode(example.answer)], len(prompt)))
    return found


def prompt_of(tokenizer: Tokenizer, example: skills.Example) -> list[int]:
    return tokenizer.encode_chat(example.messages)


def noise(model: Path, count: int, seed: int) -> list[Text]:
    rng = random.Random(seed)
    lengths = [rng.randint(LEAST_TOKENS, MOST_TOKENS) for _ in range(count)]
    longest = random_prompts(count, MOST_TOKENS, vocab_size(model), seed)
    return [Text(tokens[:length], 1) for tokens, length in zip(longest, lengths, strict=True)]


def skill_scores(steps: Steps, tokenizer: Tokenizer, count: int, seed: int) -> dict[str, float]:
    """Share of exact greedy answers, by skill."""
    end = steps.executor.model_config.eos_token_ids
    found = {}
    for skill in structured_skills.ALL:
        rng = random.Random(f"{skill}/{seed}")
        examples = [structured_skills.single(skill, rng, held_out=True) for _ in range(count)]
        right = 0
        for example in examples:
            new_tokens = len(tokenizer.encode(example.answer)) + 4
            [tokens] = steps.generate([prompt_of(tokenizer, example)], new_tokens)
            length = next((i for i, token in enumerate(tokens) if token in end), len(tokens))
            right += skills.is_correct(example, tokenizer.decode(tokens[:length], skip_special_tokens=True))
        found[skill] = right / count
    return found


def as_text(value: float | None) -> str:
    return "-" if value is None else f"{value:.6f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("111m", "neaptide-tiny"), default="neaptide-tiny")
    parser.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16"))
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--skills", type=int, default=0, help="questions for each skill of the embedded model")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model = EMBEDDED if args.model == "neaptide-tiny" else model_111m()
    found = ways(model, args.dtype, args.threads)
    tokenizer = Tokenizer(EMBEDDED)
    sequences = (
        chats(tokenizer, args.sequences, args.seed) if model == EMBEDDED else noise(model, args.sequences, args.seed)
    )
    by_way = differences({name: computed(steps, sequences) for name, steps in found.items()})
    columns = list(by_way[EXACT])
    rows = [[name, *(as_text(by_way[name][column]) for column in columns)] for name in by_way]
    dtype, count = found[PLAIN].executor.dtype_name, sum(len(each.tokens) - each.first for each in sequences)
    print_table(f"{model.name}: {count} predictions, {dtype} and 8 bits in it", ["", *columns], rows)
    result: dict[str, Any] = {"model": model.name, "dtype": dtype, "predictions": count, "differences": by_way}
    if args.skills and model == EMBEDDED:
        scores = {name: skill_scores(found[name], tokenizer, args.skills, args.seed) for name in (PLAIN, QUANTIZED)}
        rows = [[skill, *(f"{each[skill]:.3f}" for each in scores.values())] for skill in scores[PLAIN]]
        rows.append(["mean", *(f"{sum(each.values()) / len(each):.4f}" for each in scores.values())])
        print_table(f"exact answers, {args.skills} questions each", ["skill", *scores], rows)
        result["skills"] = scores
    print(json.dumps(result))


if __name__ == "__main__":
    main()
