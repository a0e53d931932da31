"""How exactly schemas are held and how long they take to compile: ours, and ``xgrammar`` where it is installed.

Files hold JSON Schemas with documents, one JSON object a line, gzipped or not: ``{"schema": ..., "tests": [{"data":
..., "valid": ...}]}``, or such objects under ``groups``. Both compilers take turns on every schema, with the same
vocabulary, and read every document in one layout, ``{"a": 1, "b": [2, 3]}``. Times are of the CPU.
"""

import gzip
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from benchmarks.common import EMBEDDED
from neaptide.models.grammars import GrammarError, Grammars
from neaptide.server.structured.grammars import answer_grammar, schema_part
from neaptide.server.structured.schemas import SchemaError

Accepts = Callable[[list[int]], bool]
"""Whether a document, as tokens, is one of the schema."""
Compiler = Callable[[Any], Accepts]
"""Raises RefusedError."""


class RefusedError(Exception):
    """The schema cannot be held."""


def ours() -> Compiler:
    """As the server compiles, what is written out or refused before the compiler included."""
    config = json.loads((EMBEDDED / "config.json").read_text())
    grammars = Grammars(EMBEDDED, config["vocab_size"], [config["eos_token_id"]])

    def compile_schema(schema: Any) -> Accepts:
        try:
            matcher = grammars.compile(answer_grammar(schema_part(schema)))
        except (SchemaError, GrammarError) as error:
            raise RefusedError from error

        def accepts(tokens: list[int]) -> bool:
            tried = matcher.deep_copy()
            return bool(tried.try_consume_tokens(tokens) == len(tokens) and tried.is_accepting())

        return accepts

    return compile_schema


def xgrammar_compiler() -> Compiler:
    """Its own limits on properties that no schema names (`strict_mode`) off: JSON Schema allows them."""
    import xgrammar

    config = json.loads((EMBEDDED / "config.json").read_text())
    vocab = Tokenizer.from_file(str(EMBEDDED / "tokenizer.json")).get_vocab()
    by_id = {token_id: token for token, token_id in vocab.items()}
    info = xgrammar.TokenizerInfo(
        [by_id.get(i, f"<unused {i}>") for i in range(config["vocab_size"])],
        vocab_type=xgrammar.VocabType.BYTE_LEVEL,
        stop_token_ids=[config["eos_token_id"]],
    )
    compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def compile_schema(schema: Any) -> Accepts:
        try:
            compiled = compiler.compile_json_schema(
                json.dumps(schema), any_whitespace=False, separators=(", ", ": "), strict_mode=False
            )
        except Exception as error:  # of several kinds
            raise RefusedError from error

        def accepts(tokens: list[int]) -> bool:
            matcher = xgrammar.GrammarMatcher(compiled)
            return all(matcher.accept_token(token) for token in [*tokens, config["eos_token_id"]])

        return accepts

    return compile_schema


def compilers() -> dict[str, Compiler]:
    found = {"ours": ours()}
    if find_spec("xgrammar") is not None:
        found["xgrammar"] = xgrammar_compiler()
    return found


def cases_of(path: Path) -> Iterator[dict[str, Any]]:
    content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    for line in content.splitlines():  # of bytes: text has ends of lines of its own
        case = json.loads(line)
        yield from case.get("groups", [case])


class Tally:
    """What one compiler made of the cases."""

    def __init__(self, compiler: Compiler) -> None:
        self._compiler = compiler
        self._counts: Counter[str] = Counter()
        self._times_ms: list[float] = []

    def add(self, case: dict[str, Any], documents: list[list[int]]) -> None:
        start_s = time.process_time()
        try:
            accepts = self._compiler(case["schema"])
        except RefusedError:
            self._counts["refused"] += 1
            return
        self._times_ms.append(1e3 * (time.process_time() - start_s))
        for test, tokens in zip(case["tests"], documents, strict=True):
            kind, end = "valid" if test["valid"] else "invalid", "accepted" if accepts(tokens) else "rejected"
            self._counts[f"{kind}_{end}"] += 1

    def summary(self) -> dict[str, float]:
        times_ms = sorted(self._times_ms)
        kinds = ("refused", "valid_accepted", "valid_rejected", "invalid_rejected", "invalid_accepted")
        compile_ms = {
            f"compile_ms_{name}": times_ms[min(int(share * len(times_ms)), len(times_ms) - 1)]
            for name, share in {"p50": 0.5, "p95": 0.95, "max": 1.0}.items()
        }
        return {"held": len(times_ms), **{kind: self._counts[kind] for kind in kinds}, **compile_ms}


def measure_cases(path: Path) -> dict[str, dict[str, float]]:
    """By compiler."""
    tokenizer = Tokenizer.from_file(str(EMBEDDED / "tokenizer.json"))
    tallies = {name: Tally(compiler) for name, compiler in compilers().items()}
    for case in cases_of(path):
        texts = [json.dumps(test["data"], ensure_ascii=False) for test in case["tests"]]
        documents = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
        for tally in tallies.values():
            tally.add(case, documents)
    return {name: tally.summary() for name, tally in tallies.items()}
