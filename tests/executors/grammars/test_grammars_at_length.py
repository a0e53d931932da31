"""Generated schemas, a random model, preemptions: every text that ended by itself is valid."""

import json
import random
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest

from neaptide.engine.params import FinishReason
from neaptide.server.structured.grammars import answer_grammar, schema_part
from neaptide.server.text.tokenizer import Tokenizer
from tests.executors.grammars.test_grammars import Run, model, tokenizer

__all__ = ["model", "tokenizer"]  # fixtures

PER_SCHEMA = 10


def random_schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    """Of bounded answers: a random model ends where the grammar leaves it nothing else."""
    kinds = ["integer", "number", "string", "pattern", "enum", "boolean", "null", "date"]
    kind = rng.choice([*kinds, *["object", "array", "anyOf"] * 2] if depth < 2 else kinds)
    low = rng.randint(-50, 50)
    leaves: dict[str, dict[str, Any]] = {
        "integer": {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 90)},
        "number": {"type": "number", "minimum": 0, "maximum": 1, "multipleOf": 0.25},
        "string": {"type": "string", "minLength": rng.randint(0, 2), "maxLength": rng.randint(2, 6)},
        "pattern": {"type": "string", "pattern": rng.choice(["^[a-c]{2,4}$", "^(x|yz){1,3}$", r"^\d{3}-[A-F]$"])},
        "enum": {"enum": rng.sample(["a", "ü", 1, 2.5, None, {"k": []}], 3)},
        "boolean": {"type": "boolean"},
        "null": {"const": None},
        "date": {"type": "string", "format": "date"},
    }
    if kind in leaves:
        return leaves[kind]
    if kind == "array":
        items = {"type": "array", "items": random_schema(rng, depth + 1)}
        return items | {"minItems": rng.randint(0, 2), "maxItems": rng.randint(2, 3)}
    if kind == "anyOf":
        return {"anyOf": [random_schema(rng, depth + 1) for _ in range(rng.randint(2, 3))]}
    names = rng.sample(["id", "name", "größe", "a b", "x", "y"], rng.randint(1, 4))
    return {
        "type": "object",
        "properties": {name: random_schema(rng, depth + 1) for name in names},
        "required": rng.sample(names, rng.randint(0, len(names))),
        "additionalProperties": False,
    }


def check(model: Path, tokenizer: Tokenizer, depth: int, seed: int, num_schemas: int) -> int:
    """Returns how many texts ended by themselves."""
    rng = random.Random(seed)
    schemas = [random_schema(rng) for _ in range(num_schemas)]
    run = Run(model, depth, num_blocks=2048)
    for index, schema in enumerate(schemas):
        grammar = answer_grammar(schema_part(schema))
        for k in range(PER_SCHEMA):
            prompt = [9, *rng.choices(range(10, 60), k=5)]
            asked = {"max_tokens": 250, "ignore_eos": False, "temperature": float(k % 2), "seed": k}
            run.add(f"{index} {k}", prompt, grammar=grammar, **asked)
        run.add(f"free {index}", [9, 10, 11], max_tokens=20)
    if depth:
        run.finish()
    else:
        run.finish_with_preemptions()
        assert sum(end.num_preemptions for end in run.ends.values()) > num_schemas
    num_ended = 0
    for name, tokens in run.tokens.items():
        if name.startswith("free") or run.ends[name].finish_reason is not FinishReason.STOP:
            continue
        num_ended += 1
        schema = schemas[int(name.split()[0])]
        validator = jsonschema_rs.validator_for(schema, validate_formats=True)
        validator.validate(json.loads(tokenizer.decode(tokens)))
    free = {tuple(tokens) for name, tokens in run.tokens.items() if name.startswith("free")}
    assert len(free) == 1  # neighbours come and go, and it stays the same
    return num_ended


@pytest.mark.parametrize("depth", [0, 1])
def test_a_few_schemas(model: Path, tokenizer: Tokenizer, depth: int) -> None:
    assert check(model, tokenizer, depth, seed=3, num_schemas=4) > 30


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("depth", [0, 1])
def test_two_hundred_schemas(model: Path, tokenizer: Tokenizer, depth: int) -> None:
    ended = sum(check(model, tokenizer, depth, seed, num_schemas=20) for seed in range(10))
    assert ended > 1_800
