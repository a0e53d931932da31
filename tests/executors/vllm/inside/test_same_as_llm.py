"""The same texts as vLLM's own ``LLM``, whose scheduler makes other batches of the same requests."""

import json
import subprocess
import sys
from pathlib import Path

import torch
from transformers import PreTrainedModel

from neaptide.executors.contract import StartedExecutor
from tests.executors.vllm.inside.runs import GAP, NUM_OUTPUT, Run, prompts


def test_greedy_texts_are_those_of_vllm_itself(
    checkpoint: tuple[Path, PreTrainedModel], started: StartedExecutor, tmp_path: Path
) -> None:
    directory, model = checkpoint
    asked, out = prompts(24, seed=21), tmp_path / "texts.json"
    command = [sys.executable, str(Path(__file__).with_name("reference.py")), str(directory), str(NUM_OUTPUT), str(out)]
    subprocess.run(command, input=json.dumps(asked), text=True, check=True, capture_output=True)
    theirs: list[list[int]] = json.loads(out.read_text())
    run = Run(started.executor, max_num_batched_tokens=100)
    for i, prompt in enumerate(asked):
        run.add(str(i), prompt)
    run.finish()
    same = 0
    for i, (prompt, text) in enumerate(zip(asked, theirs, strict=True)):
        ours = run.tokens[str(i)]
        differs_at = next((k for k in range(NUM_OUTPUT) if ours[k] != text[k]), None)
        same += differs_at is None
        if differs_at is not None:
            assert _gap(model, prompt + ours[:differs_at]) < GAP, f"prompt {i}, token {differs_at}"
    assert same >= 22


@torch.no_grad()
def _gap(model: PreTrainedModel, tokens: list[int]) -> float:
    """Between the two best logits behind ``tokens``."""
    best = model(torch.tensor([tokens])).logits[0, -1].topk(2).values
    return float(best[0] - best[1])
