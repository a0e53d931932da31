"""Families beside Llama through real servers and the real client: chats and batches say what transformers says."""

import shutil
from pathlib import Path
from typing import Any

import openai
import pytest

from neaptide.launch.serve import embedded_model_path
from tests.e2e.server import RunningServer, result_lines, submit_batch, wait_terminal
from tests.executors.driver import leading_agreement, write_family
from tests.executors.test_families import GRANITE

VOCAB = 416
"""As the embedded model's tokenizer has it."""
NUM_OUTPUT = 12
FAMILIES: dict[str, dict[str, Any]] = {"granite": GRANITE, "gpt_neox": {}, "olmo2": {"tie_word_embeddings": True}}
PROMPT = [7 * number % 400 + 10 for number in range(40)]


@pytest.mark.parametrize(
    "family", ["granite", *(pytest.param(name, marks=pytest.mark.full) for name in ("gpt_neox", "olmo2"))]
)
def test_a_completion_beside_a_batch_equals_transformers(family: str, tmp_path: Path) -> None:
    directory = tmp_path / "model"
    model = write_family(family, directory, vocab_size=VOCAB, **FAMILIES[family])
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(embedded_model_path() / name, directory)
    own = {"return_token_ids": True, "ignore_eos": True}
    asked = own | {"model": "model", "temperature": 0.0, "max_tokens": NUM_OUTPUT}
    prompts = [[*PROMPT[: 40 - number], 5 + number] for number in range(4)]
    with RunningServer(tmp_path, str(directory), "--dtype", "float32", "--max-model-len", "128") as server:
        batch = submit_batch(server, [asked | {"prompt": prompt} for prompt in prompts], "/v1/completions")
        client = openai.OpenAI(base_url=server.base_url, api_key="-")
        reply = client.completions.create(
            model="model", prompt=PROMPT, max_tokens=NUM_OUTPUT, temperature=0.0, extra_body=own
        )
        lines = result_lines(server, wait_terminal(server, batch))
    answers = {line["custom_id"]: line["response"]["body"]["choices"][0]["token_ids"] for line in lines}
    outputs = [(PROMPT, reply.choices[0].model_dump()["token_ids"])]
    outputs += [(prompt, answers[f"c{number}"]) for number, prompt in enumerate(prompts)]
    assert [len(output) for _, output in outputs] == [NUM_OUTPUT] * 5
    assert sum(leading_agreement(model, prompt, output) for prompt, output in outputs) > 30
