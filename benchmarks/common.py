"""Parts that the benchmarks share: the 111M model, the correctness check, fixed workloads, printing."""

import json
import os
import platform
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import torch
from rich.console import Console
from rich.table import Table

REPOSITORY = Path(__file__).parents[1]
EMBEDDED = REPOSITORY / "neaptide" / "data" / "neaptide-tiny"
CLIENT_LIMITS = httpx.Limits(max_connections=None, keepalive_expiry=1.0)
"""Limits for clients that pause between requests. Many servers close idle connections after 5 s, perhaps just when the
client uses one again."""
FIRST_TOKEN_ID = 10
"""Random prompts use no lower id, because those are special tokens."""
GAP = {torch.float32: 1e-3, torch.bfloat16: 5e-2}
"""The check ends at the first position where the reference's two best logits are closer than this."""


def model_111m() -> Path:
    """The benchmark model's directory. The first call writes it (a minute) into the user's cache."""
    directory = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "neaptide" / "llama-111m"
    if not (directory / "model.safetensors").exists():
        subprocess.run([sys.executable, REPOSITORY / "tools" / "make_111m.py", "--out", directory], check=True)
    return directory


def vocab_size(model: Path) -> int:
    size: int = json.loads((model / "config.json").read_text())["vocab_size"]
    return size


def random_prompts(count: int, num_tokens: int, vocab: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(FIRST_TOKEN_ID, vocab) for _ in range(num_tokens)] for _ in range(count)]


class Reference:
    """The same checkpoint in ``transformers``, as a reference."""

    def __init__(self, model: Path, dtype: torch.dtype = torch.float32) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=dtype).eval()

    def generate(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> list[list[int]]:
        """Greedy answers of exactly ``new_tokens`` tokens each, in one batch; all prompts have one length."""
        ids = torch.tensor([list(p) for p in prompts])
        with torch.inference_mode():
            out = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=new_tokens,
                min_new_tokens=new_tokens,
                eos_token_id=None,
                pad_token_id=0,
            )
        return [row[ids.shape[1] :].tolist() for row in out]

    def agreement(self, prompt: Sequence[int], tokens: Sequence[int]) -> int:
        """Checks greedy ``tokens`` against the reference, up to the first close call. Returns how many were
        compared.

        Raises:
            SystemExit: a token differs from the reference's.
        """
        with torch.inference_mode():
            logits = self.model(torch.tensor([[*prompt, *tokens]])).logits[0].float()
        for i, token in enumerate(tokens):
            best = logits[len(prompt) + i - 1].topk(2)
            if float(best.values[0] - best.values[1]) < GAP[self.model.dtype]:
                return i
            if int(best.indices[0]) != token:
                raise SystemExit(f"wrong output: token {i} is {token}, the reference says {int(best.indices[0])}")
        return len(tokens)


def machine() -> dict[str, object]:
    """What the figures were measured on."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    facts = dict(line.split(":", 1) for line in lines if line.count(":") == 1)
    named = {key.strip(): value.strip() for key, value in facts.items()}
    flags = set(named.get("flags", "").split())
    return {
        "processor": named.get("model name", platform.machine()),
        "cores": os.cpu_count(),
        "features": sorted(
            flags & {"avx2", "f16c", "fma", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "amx_int8"}
        ),
        "load": os.getloadavg(),
        "python": platform.python_version(),
    }


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    table = Table(title=title, title_justify="left")
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else "left")
    for row in rows:
        table.add_row(*(f"{cell:,.3g}" if isinstance(cell, float) else str(cell) for cell in row))
    Console(width=110).print(table)
