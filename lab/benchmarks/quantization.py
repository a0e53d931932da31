"""What 8-bit numbers (``--quantization w8a8``) do to a model's answers and to its speed.

Answers: all layers but the logits' are quantized, whether that is faster or not, and in another row the logits too.
Every position of some sequences is computed each way, in one chunk each: how often the most likely token is the same,
how far the logits are from those in float32, and the perplexity of the tokens that are there. Sequences are parts of
this repository's ``docs/*.md`` for a directory's model. For the embedded one they are chats with the right answers, of
which only the answers count. For the 111M model, whose text is noise, they are random tokens, whose perplexity says
nothing. Then the embedded model's skills: exact answers to held-out questions.

Speed: steps without and with ``w8a8`` by turns, where each layer is quantized only if that is faster.

    python -m lab.benchmarks.quantization [--model DIR] [--sequences 64] [--skills 20] [--repeats 9]

Prints tables, then one JSON line.
"""

import argparse
import json
import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from benchmarks.common import EMBEDDED, REPOSITORY, machine, model_111m, print_table, random_prompts, vocab_size
from lab.benchmarks import cpu_kernels
from lab.benchmarks.cpu_kernels import BLOCK_SIZE, SHAPES, Steps
from neaptide.data import skills, structured_skills
from neaptide.executors.torch.layers.linear import quantize
from neaptide.kernels.paged_attention import StepTables
from neaptide.server.text.tokenizer import Tokenizer

LEAST_TOKENS, MOST_TOKENS = 128, 256
"""Lengths of a random sequence."""
PAGE_TOKENS = 512
EXACT, PLAIN, QUANTIZED, WITH_LOGITS = "float32", "without", "w8a8", "w8a8, logits too"
SPEEDS = ("decode 1, context 250", "decode 8, context 250", "decode 64, context 200-326", "prefill 256")


class Text(NamedTuple):
    tokens: list[int]
    first: int
    """Token from which on predictions count."""


@dataclass
class Difference:
    """How far the predictions of one way are from the exact one's, in sums over all predictions that count."""

    predictions: int = 0
    surprise: float = 0.0
    """Negative log-probabilities of the tokens that are there."""
    same: int = 0
    sure: int = 0
    """Predictions of which the exact way is sure: a gap of 1 to the second."""
    same_and_sure: int = 0
    mean_square: float = 0.0
    """Mean squared difference of the log-probabilities from the exact way's, summed over predictions."""

    def add(self, logits: Tensor, exact: Tensor, targets: Tensor) -> None:
        """Predictions [count, vocabulary] of this way and the exact one, and the tokens [count] that are there."""
        best, logprobs = exact.topk(2).values, logits.log_softmax(dim=-1)
        is_sure = best[:, 0] - best[:, 1] > 1.0
        is_same = logits.argmax(dim=-1) == exact.argmax(dim=-1)
        self.predictions += len(targets)
        self.surprise -= float(logprobs.gather(1, targets.unsqueeze(1)).sum())
        self.same += int(is_same.sum())
        self.sure += int(is_sure.sum())
        self.same_and_sure += int((is_same & is_sure).sum())
        self.mean_square += float((logprobs - exact.log_softmax(dim=-1)).square().mean(dim=1).sum())

    def figures(self) -> dict[str, float | None]:
        """Perplexity, the fraction of equal most likely tokens, the same where the exact way is sure, and the root mean
        square error of the log-probabilities."""
        return {
            "perplexity": math.exp(self.surprise / self.predictions),
            "same_token": self.same / self.predictions,
            "same_token_where_sure": self.same_and_sure / self.sure if self.sure else None,
            "rms": math.sqrt(self.mean_square / self.predictions),
        }


def logits_of(steps: Steps, tokens: Sequence[int]) -> Tensor:
    """[tokens, vocabulary] fp32, of one chunk."""
    runner, count = steps.executor._runner, len(tokens)
    table = np.arange(-(-count // BLOCK_SIZE)).reshape(1, -1)
    with torch.inference_mode():
        plan = runner.plan_attention(np.array([count]), np.array([count]), StepTables.of(table))
        hidden = runner.model.forward(torch.tensor(tokens), torch.arange(count), runner.kv_cache, plan)
        return runner.model.logits(hidden)


def ways(model: Path, dtype: str, threads: int) -> dict[str, Steps]:
    """The ways to compute. The one without quantization shows the difference of the type, the quantized ones that of
    the numbers; it is left out where the type is float32."""
    found = {EXACT: Steps(model, "torch", "float32", threads)}
    found |= {name: Steps(model, "torch", dtype, threads) for name in (PLAIN, QUANTIZED, WITH_LOGITS)}
    if found[PLAIN].executor.dtype == torch.float32:
        del found[PLAIN]
    with torch.inference_mode():
        quantize(found[QUANTIZED].executor._runner.model.linears()[:-1])
        quantize(found[WITH_LOGITS].executor._runner.model.linears())
    return found


def differences(found: Mapping[str, Steps], sequences: Iterable[Text]) -> dict[str, Difference]:
    by_way = {name: Difference() for name in found}
    for text in sequences:
        targets = torch.tensor(text.tokens[text.first :])
        logits = {name: logits_of(steps, text.tokens)[text.first - 1 : -1] for name, steps in found.items()}
        for name, difference in by_way.items():
            difference.add(logits[name], logits[EXACT], targets)
    return by_way


def pages(tokenizer: Tokenizer, count: int) -> list[Text]:
    """Parts of the repository's user docs, at equal distances."""
    text = "\n\n".join(page.read_text(encoding="utf-8") for page in sorted((REPOSITORY / "docs").glob("*.md")))
    tokens = tokenizer.encode(text)
    distance = max(PAGE_TOKENS, len(tokens) // count)
    starts = range(0, len(tokens) - PAGE_TOKENS, distance)
    return [Text(tokens[start : start + PAGE_TOKENS], 1) for start in starts[:count]]


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


def sequences_of(model: Path, count: int, seed: int) -> list[Text]:
    if model == EMBEDDED:
        return chats(Tokenizer(EMBEDDED), count, seed)
    return noise(model, count, seed) if model == model_111m() else pages(Tokenizer(model), count)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="neaptide-tiny", help="neaptide-tiny, 111m or a directory")
    parser.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16"))
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--skills", type=int, default=0, help="questions for each skill of the embedded model")
    parser.add_argument("--repeats", type=int, default=9, help="timed steps of each kind; 0 for no speed")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model = EMBEDDED if args.model == "neaptide-tiny" else model_111m() if args.model == "111m" else Path(args.model)
    result: dict[str, Any] = {"model": model.name, "machine": machine(), "threads": args.threads}
    found = ways(model, args.dtype, args.threads)
    by_way = differences(found, sequences_of(model, args.sequences, args.seed))
    figures = {name: each.figures() for name, each in by_way.items()}
    columns = list(figures[EXACT])
    rows = [[name, *(as_text(each[column]) for column in columns)] for name, each in figures.items()]
    dtype, count = found[QUANTIZED].executor.dtype_name, by_way[EXACT].predictions
    print_table(f"{model.name}: {count} predictions, 8 bits in {dtype}", ["", *columns], rows)
    result |= {"dtype": dtype, "predictions": count, "differences": figures}
    if args.skills and model == EMBEDDED:
        tokenizer, asked = Tokenizer(EMBEDDED), [name for name in found if name in (EXACT, PLAIN, QUANTIZED)]
        scores = {name: skill_scores(found[name], tokenizer, args.skills, args.seed) for name in asked}
        rows = [[skill, *(f"{each[skill]:.3f}" for each in scores.values())] for skill in scores[QUANTIZED]]
        rows.append(["mean", *(f"{sum(each.values()) / len(each):.4f}" for each in scores.values())])
        print_table(f"exact answers, {args.skills} questions each", ["skill", *scores], rows)
        result["skills"] = scores
    del found
    if args.repeats:
        pair = cpu_kernels.QUANTIZED
        both = {name: Steps(model, name, args.dtype, args.threads) for name in pair}
        steps = cpu_kernels.compare(both, args.repeats, {name: SHAPES[name] for name in SPEEDS})
        keys = ["step", *(f"{name}_cpu_ms" for name in pair), "ratio", "ratio_of_medians"]
        rows = [[step[key] for key in keys] for step in steps]
        title = f"{model.name}, {dtype}, {args.threads} threads: CPU ms of a step"
        print_table(title, ["step", "without", "w8a8", "ratio", "of medians"], rows)
        result |= {"ratios": {step["step"]: step["ratio"] for step in steps}, "steps": steps}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
