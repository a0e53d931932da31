"""Measures a chat model's exact accuracy on the skills of `neaptide.data.skills`, through transformers.

    python -m tools.eval_tiny neaptide/data/neaptide-tiny --single 200 --few 24 --shots 1 4 8 600

Every question is held out from training, except that the closed skills share their content. Decoding is greedy.
Prompts go through the chat template, and a batch holds prompts of similar length, padded on the left. A shot count
above 50 means as many examples as fit in that many tokens.

Skills whose answers have a form (calls, JSON) are asked a second time under the grammar that the server would use: one
call of any of the given functions, or an object with the right members.
"""

import argparse
import json
import random
import time
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LogitsProcessor, LogitsProcessorList

from neaptide.data import skills, structured_skills
from neaptide.executors.grammar_masks import Follower
from neaptide.models.grammars import Grammars
from neaptide.server.structured.call_formats import HERMES
from neaptide.server.structured.grammars import Calls, OfferedTool, answer_grammar, calls_grammar, schema_part
from neaptide.server.text.tokenizer import Tokenizer

GRAMMAR = "grammar"
"""Table column of single questions answered under a grammar."""


def grammar_of(example: skills.Example, tokenizer: Tokenizer) -> str | None:
    """The grammar that the server makes for a request that forces this answer's form; None if it has no form."""
    if example.skill == "json":
        return answer_grammar(schema_part(structured_skills.json_schema(example.answer)))
    if example.skill != "call":
        return None
    functions = [tool.definition()["function"] for tool in structured_skills.offered(example.messages)]
    tools = [OfferedTool(function["name"], function["parameters"], False) for function in functions]
    marks = [tokenizer.added_id(mark) for mark in (HERMES.begin, HERMES.end)]
    return calls_grammar(Calls(tools, HERMES, *marks, forced=True, several=False), None)


class Masks(LogitsProcessor):  # type: ignore[misc]
    """Masks each row's logits by its grammar, applied to the tokens after the first `width`."""

    def __init__(self, grammars: Grammars, texts: list[str], width: int, end: int) -> None:
        self.grammars, self.width, self.end = grammars, width, end
        self.followers = [Follower(text) for text in texts]

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        for row, follower in enumerate(self.followers):
            output = input_ids[row, self.width :].numpy().astype(np.int32)
            if self.end not in output:
                mask = np.frombuffer(follower.follow(output, self.grammars).compute_bitmask(), np.uint8)
                allowed = np.unpackbits(mask, bitorder="little")[: scores.shape[1]]
                scores[row, torch.from_numpy(allowed == 0)] = -torch.inf
        return scores


class Evaluator:
    """A loaded model that answers examples in batches."""

    def __init__(self, directory: Path, dtype: torch.dtype, batch: int) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(directory)
        self.model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).eval()
        self.batch = batch
        self.server_tokenizer = Tokenizer(directory)
        config = self.model.config
        self.grammars = Grammars(directory, config.vocab_size, [config.eos_token_id])

    def prompt(self, example: skills.Example) -> list[int]:
        """The tokens of an example's prompt."""
        text = self.tokenizer.apply_chat_template(example.messages, tokenize=False, add_generation_prompt=True)
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    @torch.inference_mode()
    def answers(self, examples: list[skills.Example], constrained: bool = False) -> list[str]:
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
            masks = LogitsProcessorList()
            if constrained:
                texts = [text for i in part if (text := grammar_of(examples[i], self.server_tokenizer)) is not None]
                masks.append(Masks(self.grammars, texts, width, self.model.config.eos_token_id))
            out = self.model.generate(
                torch.tensor(padded), attention_mask=torch.tensor(mask), do_sample=False,
                max_new_tokens=max(wanted[i] for i in part) + 8, logits_processor=masks,
            )  # fmt: skip
            texts = self.tokenizer.batch_decode(out[:, width:], skip_special_tokens=True)
            for i, text in zip(part, texts, strict=True):
                answers[i] = text
        return answers

    def few_shot(self, skill: str, rng: random.Random, shots: int) -> skills.Example:
        """A few-shot example; a count above 50 is a limit in tokens."""
        if shots <= 50:
            return structured_skills.few_shot(skill, rng, shots, held_out=True, text=rng.random() < 0.2)
        seed = rng.random()
        best = structured_skills.few_shot(skill, random.Random(seed), 1, held_out=True)
        for count in range(2, 100):
            example = structured_skills.few_shot(skill, random.Random(seed), count, held_out=True)
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
    parser.add_argument("--skills", nargs="*", default=list(structured_skills.ALL))
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
    heads = ["single", *(f"{s} tokens" if s > 50 else f"{s} shots" for s in args.shots), GRAMMAR]
    print("skill".ljust(14) + "".join(h.rjust(12) for h in heads), flush=True)
    for skill in args.skills:
        rng = random.Random(f"{skill}/{args.seed}")
        sets = {heads[0]: [structured_skills.single(skill, rng, held_out=True) for _ in range(args.single)]}
        for head, shots in zip(heads[1:], args.shots, strict=False):
            sets[head] = [run.few_shot(skill, rng, shots) for _ in range(args.few)]
        if grammar_of(sets[heads[0]][0], run.server_tokenizer) is not None:
            sets[GRAMMAR] = sets[heads[0]]
        row: dict[str, float] = {}
        wrong: list[tuple[str, str, str]] = []
        for head, examples in sets.items():
            texts = run.answers(examples, head == GRAMMAR)
            good = [skills.is_correct(e, t) for e, t in zip(examples, texts, strict=True)]
            row[head] = round(100 * sum(good) / max(1, len(good)), 1)
            wrong += [
                (e.messages[-1]["content"], e.answer, t)
                for e, t, ok in zip(examples, texts, good, strict=True) if not ok
            ]  # fmt: skip
        table[skill] = row
        print(skill.ljust(14) + "".join(f"{row[h]:12.1f}" if h in row else " " * 12 for h in heads), flush=True)
        for question, answer, text in wrong[: args.errors]:
            print(f"    {question!r}\n      wanted {answer!r}\n      got    {text!r}")
    columns = {h: [r[h] for r in table.values() if h in r] for h in heads}
    means = {h: round(sum(column) / len(column), 2) for h, column in columns.items() if column}
    print("mean".ljust(14) + "".join(f"{means[h]:12.1f}" if h in means else " " * 12 for h in heads))
    print(json.dumps({
        "dtype": args.dtype, "single_n": args.single, "few_n": args.few, "mean": means,
        "skills": table, "seconds": round(time.monotonic() - start),
    }))  # fmt: skip


if __name__ == "__main__":
    main()
