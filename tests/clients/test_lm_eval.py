"""``lm-eval`` through the completions endpoint: its numbers are those of the checkpoint in ``transformers``."""

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from neaptide.data.skills import SKILLS, Example, single
from neaptide.launch.serve import embedded_model_path
from tests.clients.environment import HERE, ClientEnvironment
from tests.e2e.server import RunningServer

LM_EVAL = ClientEnvironment("lm-eval")
NUM_PER_SKILL = 2
NUM_BARE_SUMS = 24
LOGLIKELIHOOD_TOLERANCE = 1e-3
pytestmark = LM_EVAL.marks


class Reference:
    """The checkpoint computed by ``transformers`` in float32."""

    def __init__(self) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(embedded_model_path())
        self._model = AutoModelForCausalLM.from_pretrained(embedded_model_path(), dtype=torch.float32)

    def prompt(self, example: Example) -> str:
        """The chat as the text that a completion continues."""
        text = self._tokenizer.apply_chat_template(example.messages, add_generation_prompt=True, tokenize=False)
        return str(text)

    def answer(self, prompt: str) -> str:
        """Greedy decoding."""
        ids = self._tokenizer(prompt, return_tensors="pt")
        out = self._model.generate(**ids, max_new_tokens=320, do_sample=False)
        return str(self._tokenizer.decode(out[0][ids["input_ids"].shape[1] :], skip_special_tokens=True))

    def loglikelihood(self, prompt: str, continuation: str) -> tuple[float, bool]:
        """Of the continuation, and whether it is what greedy decoding would write."""
        start = len(self._tokenizer(prompt)["input_ids"])
        ids = torch.tensor(self._tokenizer(prompt + continuation)["input_ids"])
        with torch.inference_mode():
            logprobs = torch.log_softmax(self._model(ids[None]).logits[0, start - 1 : -1], -1)
        target = ids[start:, None]
        return float(logprobs.gather(1, target).sum()), bool((logprobs.argmax(-1) == target[:, 0]).all())


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference()


@dataclass(frozen=True)
class Evaluation:
    """What ``lm-eval`` says of one task: its metrics, and what it noted for each question."""

    metrics: dict[str, Any]
    samples: list[dict[str, Any]]


def evaluate(task: str, rows: Sequence[Mapping[str, Any]], model_args: str, work_dir: Path) -> Evaluation:
    """Runs ``tasks/TASK.yaml`` on ``rows``."""
    (work_dir / f"{task}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = ["run", "--model", "local-completions", "--model_args", model_args, "--tasks", task]
    command += ["--include_path", str(HERE / "tasks"), "--output_path", "out", "--log_samples"]
    LM_EVAL.run("lm_eval", *command, env={"HF_HOME": str(work_dir / "cache")}, cwd=work_dir)
    (results,) = (work_dir / "out").rglob("results_*.json")
    (samples,) = (work_dir / "out").rglob("samples_*.jsonl")
    lines = [json.loads(line) for line in samples.read_text().splitlines()]
    return Evaluation(json.loads(results.read_text())["results"][task], sorted(lines, key=lambda line: line["doc_id"]))


def model_args(server: RunningServer, **more: object) -> str:
    arguments = {"model": "neaptide-tiny", "base_url": f"{server.base_url}/completions", **more}
    return ",".join(f"{name}={value}" for name, value in arguments.items())


def held_out_questions() -> list[Example]:
    rng = random.Random(11)
    return [single(skill, rng, held_out=True) for skill in SKILLS for _ in range(NUM_PER_SKILL)]


def choice_rows(reference: Reference) -> list[dict[str, Any]]:
    """The right answer among three of other questions; and sums without their working, which the model guesses."""
    rng = random.Random(12)
    questions = held_out_questions()
    rows = []
    for example in questions:
        others = sorted({other.answer for other in questions} - {example.answer})
        rows.append((reference.prompt(example), example.answer, rng.sample(others, 3)))
    for _ in range(NUM_BARE_SUMS):
        a, b = rng.randrange(10, 100), rng.randrange(10, 100)
        example = Example("add", [{"role": "user", "content": f"What is {a} + {b}?"}], str(a + b))
        wrong = [str(a + b + error) for error in rng.sample((-10, -1, 1, 10), 3)]
        rows.append((reference.prompt(example), example.answer, wrong))
    return [_shuffled(*row, rng) for row in rows]


def _shuffled(prompt: str, answer: str, wrong: list[str], rng: random.Random) -> dict[str, Any]:
    choices = [answer, *wrong]
    rng.shuffle(choices)
    return {"prompt": prompt, "choices": choices, "label": choices.index(answer)}


def test_generated_answers_are_the_reference_s(server: RunningServer, reference: Reference, tmp_path: Path) -> None:
    rows = [{"prompt": reference.prompt(example), "answer": example.answer} for example in held_out_questions()]
    arguments = model_args(server, tokenizer_backend="none", tokenized_requests=False)
    evaluation = evaluate("neaptide_generate", rows, arguments, tmp_path)
    expected = [reference.answer(row["prompt"]) for row in rows]
    assert [sample["filtered_resps"][0] for sample in evaluation.samples] == expected
    accuracy = sum(text == row["answer"] for text, row in zip(expected, rows, strict=True)) / len(rows)
    assert evaluation.metrics["exact_match,none"] == pytest.approx(accuracy)
    assert accuracy > 0.9
    print(f"accuracy {accuracy:.4f} over {len(rows)} questions")


@pytest.mark.parametrize("backend", ["huggingface", "remote"])
def test_loglikelihoods_are_the_reference_s(
    server: RunningServer, reference: Reference, tmp_path: Path, backend: str
) -> None:
    rows = choice_rows(reference)
    tokenizer = {"tokenizer": embedded_model_path()} if backend == "huggingface" else {}
    arguments = model_args(server, tokenizer_backend=backend, max_length=1024, num_concurrent=2, **tokenizer)
    evaluation = evaluate("neaptide_choice", rows, arguments, tmp_path)
    differences, hits = [], 0
    for row, sample in zip(rows, evaluation.samples, strict=True):
        expected = [reference.loglikelihood(row["prompt"], choice) for choice in row["choices"]]
        found = [(float(value), greedy == "True") for value, greedy in sample["filtered_resps"]]
        assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
        differences += [abs(f - e) for (f, _), (e, _) in zip(found, expected, strict=True)]
        hits += max(range(4), key=lambda i: expected[i][0]) == row["label"]
    assert max(differences) <= LOGLIKELIHOOD_TOLERANCE
    assert evaluation.metrics["acc,none"] == pytest.approx(hits / len(rows))
    # Neither always right nor guessing: equal accuracies say something.
    assert 0.5 < hits / len(rows) < 1.0
    print(f"accuracy {hits / len(rows):.4f}; largest difference {max(differences):.2e} of {len(differences)}")
