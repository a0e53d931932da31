"""The training script, run end to end on a very small budget."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.full
def test_smoke_run_writes_a_loadable_model_and_the_loss_falls(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    out = tmp_path / "model"
    command = [sys.executable, "-m", "tools.train_tiny", "--out", str(out), "--smoke"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    losses = [float(x) for x in re.findall(r"loss ([\d.]+)", done.stdout)]
    assert len(losses) >= 2
    assert losses[-1] < losses[0] * 0.7
    assert json.loads(done.stdout.splitlines()[-1])["tokens"] > 0

    tokenizer = AutoTokenizer.from_pretrained(out)
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    assert model.config.model_type == "llama"
    assert model.config.max_position_embeddings == 8192
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Spell cat."}], tokenize=False, add_generation_prompt=True
    )
    assert text == "<|bos|><|user|>Spell cat.<|end|><|assistant|>"
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=False)
    made = model.generate(**ids, max_new_tokens=4, do_sample=False)
    assert made.shape[1] <= ids["input_ids"].shape[1] + 4
