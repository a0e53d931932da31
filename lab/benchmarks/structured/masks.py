"""What masks cost beside a step of the 111M model's layers with a vocabulary of 128k.

The model has random weights and the tokenizer invented words: what is measured depends on their sizes alone. Steps with
and without grammars take turns.
"""

import argparse
import random
import statistics
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.common import random_prompts
from neaptide.engine.clock import MonotonicClock
from neaptide.engine.config import CacheConfig, ExecutorConfig
from neaptide.engine.params import SamplingParams
from neaptide.engine.steps.plan import NewRequest, ScheduledRequest, StepPlan
from neaptide.executors.step_mask import Constrained
from neaptide.executors.torch.sampling.logits_edits import Allowed, edit_logits
from neaptide.executors.torch.torch_executor import TorchExecutor
from neaptide.server.structured.grammars import answer_grammar, schema_part

EOS_TOKEN_ID = 0
PROMPT_TOKENS = 32
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "items": {"type": "array", "items": {"type": "string"}},
        "note": {"type": "string"},
    },
    "required": ["name", "items", "note"],
}
"""A random model stays in its strings, where a mask is largest."""


def write_model(directory: Path, vocab_size: int) -> None:
    """The 111M model's layers under a vocabulary of another size, and a tokenizer of invented words."""
    rng = random.Random(0)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<end>": EOS_TOKEN_ID} | {character: i for i, character in enumerate(alphabet, 1)}
    while len(vocab) < vocab_size:
        word = "".join(rng.choices("abcdefghijklmnopqrstuvwxyzĠ0123456789,.:", k=rng.randint(2, 9)))
        vocab.setdefault(word, len(vocab))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        eos_token_id=EOS_TOKEN_ID,
        bos_token_id=EOS_TOKEN_ID,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)


class Crowd:
    """Requests that decode together on one executor."""

    def __init__(self, executor: TorchExecutor, name: str, count: int, grammar: str, first_block: int) -> None:
        self._executor = executor
        self._ids = [f"{name}-{i}" for i in range(count)]
        self._tokens = random_prompts(count, PROMPT_TOKENS, 5000, seed=1)
        self._blocks = [list(range(first_block + 8 * i, first_block + 8 * i + 8)) for i in range(count)]
        params = SamplingParams(max_tokens=90, temperature=1.0, grammar=grammar)
        new = [NewRequest(name, list(p), params) for name, p in zip(self._ids, self._tokens, strict=True)]
        self._run(new, 0)

    def decode(self) -> float:
        """One token for each; returns the step's seconds."""
        return self._run([], len(self._tokens[0]) - 1)

    def _run(self, new: list[NewRequest], start: int) -> float:
        output = len(self._tokens[0]) - PROMPT_TOKENS
        parts = [
            ScheduledRequest(name, tokens[start:], start, blocks, True, output)
            for name, tokens, blocks in zip(self._ids, self._tokens, self._blocks, strict=True)
        ]
        plan = StepPlan.of_parts(1, parts, new)
        for row, tokens in enumerate(self._tokens):  # what a plan made by hand leaves out
            plan.table.tokens[row, : len(tokens)] = tokens
        start_s = time.perf_counter()
        result = self._executor.submit(plan).wait()
        seconds = time.perf_counter() - start_s
        if result.errors:
            raise SystemExit(f"requests failed: {Counter(result.errors.values())}")
        for tokens, token in zip(self._tokens, result.token_ids.tolist(), strict=True):
            tokens.append(token)
        return seconds


def measure_masks(args: argparse.Namespace) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as path:
        directory = Path(path)
        write_model(directory, args.vocab)
        executor = TorchExecutor(
            ExecutorConfig(model_path=path, device="cpu", num_threads=args.threads),
            CacheConfig(block_size=16, num_blocks=16 * args.requests),
            MonotonicClock(),
        )
        grammar = answer_grammar(schema_part(SCHEMA))
        free = Crowd(executor, "free", args.requests, "", 0)
        bound = Crowd(executor, "bound", args.requests, grammar, 8 * args.requests)
        steps = [(free.decode(), bound.decode()) for _ in range(args.steps)]
        masks, states = executor._grammar_masks, list(executor._states.values())[-args.requests :]
        fills_s, applies_s = [], []
        logits = torch.randn(args.requests, args.vocab)
        outputs = [tokens[PROMPT_TOKENS:] for tokens in bound._tokens]
        for _ in range(10):
            constrained = [
                Constrained(name, state.follower, torch.tensor(output, dtype=torch.int32).numpy(), None)
                for name, state, output in zip(bound._ids, states, outputs, strict=True)
                if state.follower is not None
            ]
            start_s = time.perf_counter()
            mask = masks.fill(constrained).collect()
            fills_s.append(time.perf_counter() - start_s)
            start_s = time.perf_counter()
            allowed = Allowed(list(range(args.requests)), torch.from_numpy(mask.bits))
            edit_logits(logits, states, [1] * args.requests, allowed)
            applies_s.append(time.perf_counter() - start_s)
    free_ms, bound_ms = (1e3 * statistics.median(column) for column in zip(*steps, strict=True))
    return {
        "step_ms": free_ms,
        "step_with_grammars_ms": bound_ms,
        "slower": bound_ms / free_ms - 1,
        "fill_ms": 1e3 * statistics.median(fills_s),
        "apply_ms": 1e3 * statistics.median(applies_s),
        "tokens_per_s": 1e3 * args.requests / free_ms,
        "tokens_per_s_with_grammars": 1e3 * args.requests / bound_ms,
    }
