"""Exact accuracy of a chat model on the skills of `neaptide.data.skills`, through transformers.

    python -m tools.eval_tiny neaptide/data/neaptide-tiny --single 200 --few 24 --shots 1 4 8 600

Every question is held out from training (the closed skills share their content), decoding is
greedy, prompts go through the chat template, and a batch holds prompts of like length, padded left.
A shot count above 50 means: as many examples as fit in that many tokens.
"""

import argparse
import json
import random
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from neaptide.data import skills


class Evaluator:
    """A loaded model that answers examples in batches."""

    def __init__(self, directory: Path, dtype: torch.dtype, batch: int) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(directory)
        self.model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).eval()
        self.batch = batch

    def prompt(self, example: skills.Example) -> list[int]:
        """The tokens of an example's prompt."""
        text = self.tokenizer.apply_chat_template(example.messages, tokenize=False, add_generation_prompt=True)
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    @torch.inference_mode()
    def answers(self, examples: list[skills.Example]) -> list[str]:
        """The greedy answer to each example."""
        prompts = [self.prompt(e) for e in examples]
        wanted = [len(self.tokenizer(e.answer)["input_ids"]) for e in examples]
        order = sorted(range(len(prompts)), key=lambda i: (len(prompts[i]), wanted[i]))
        answers = [""] * len(prompts)
        for start in range(0, len(order), self.batch):
            part = order[start : start + self.batch]
            width = max(len(prompts[i]) for i in part)
            padded = [[0] * (width - len(prompts[i])) + prompts[i] for i in part]
            mask = [[0] * (width - len(prompts[i])) + [1] * len(prompts[i]) for i in part]
            out = self.model.generate(
                torch.tensor(padded), attention_mask=torch.tensor(mask), do_sample=False,
                max_new_tokens=max(wanted[i] for i in part) + 8,
            )  # fmt: skip
            texts = self.tokenizer.batch_decode(out[:, width:], skip_special_tokens=True)
            for i, text in zip(part, texts, strict=True):
                answers[i] = text
        return answers

    def few_shot(self, skill: str, rng: random.Random, shots: int) -> skills.Example:
        """A few-shot example; a count above 50 is a limit in tokens."""
        if shots <= 50:
            return skills.few_shot(skill, rng, shots, held_out=True, text=rng.random() < 0.2)
        seed = rng.random()
        best = skills.few_shot(skill, random.Random(seed), 1, held_out=True)
        for count in range(2, 100):
            example = skills.few_shot(skill, random.Random(seed), count, held_out=True)
            if len(self.prompt(example)) > shots:
                break
            best = example
        return best


def main() -> None:
    """Parse the command line, measure, print a table and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--single", type=int, default=200, help="single questions per skill")
    parser.add_argument("--few", type=int, default=24, help="few-shot questions per skill and count")
    parser.add_argument("--shots", type=int, nargs="*", default=[1, 4, 8, 600])
    parser.add_argument("--skills", nargs="*", default=list(skills.SKILLS))
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--batch", type=int, default=50)
    parser.add_argument("--seed", type=int, default=12345)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--errors", type=int, default=0, help="wrong answers to print per skill")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    run = Evaluator(args.directory, getattr(torch, args.dtype), args.batch)
    start = time.monotonic()
    table: dict[str, dict[str, float]] = {}
    heads = ["single"] + [f"{s} tokens" if s > 50 else f"{s} shots" for s in args.shots]
    print("skill".ljust(14) + "".join(h.rjust(12) for h in heads), flush=True)
    for skill in args.skills:
        rng = random.Random(f"{skill}/{args.seed}")
        sets = [[skills.single(skill, rng, held_out=True) for _ in range(args.single)]]
        for shots in args.shots:
            sets.append([run.few_shot(skill, rng, shots) for _ in range(args.few)])
        row: dict[str, float] = {}
        wrong: list[tuple[str, str, str]] = []
        for head, examples in zip(heads, sets, strict=True):
            texts = run.answers(examples)
            good = [skills.is_correct(e, t) for e, t in zip(examples, texts, strict=True)]
            row[head] = round(100 * sum(good) / max(1, len(good)), 1)
            wrong += [
                (e.messages[-1]["content"], e.answer, t)
                for e, t, ok in zip(examples, texts, good, strict=True) if not ok
            ]  # fmt: skip
        table[skill] = row
        print(skill.ljust(14) + "".join(f"{row[h]:12.1f}" for h in heads), flush=True)
        for question, answer, text in wrong[: args.errors]:
            print(f"    {question!r}\n      wanted {answer!r}\n      got    {text!r}")
    means = {h: round(sum(r[h] for r in table.values()) / len(table), 2) for h in heads}
    print("mean".ljust(14) + "".join(f"{means[h]:12.1f}" for h in heads))
    print(json.dumps({
        "dtype": args.dtype, "single_n": args.single, "few_n": args.few, "mean": means,
        "skills": table, "seconds": round(time.monotonic() - start),
    }))  # fmt: skip


if __name__ == "__main__":
    main()
