"""How exactly schemas are held and how long they take to compile: ours, and ``xgrammar`` where it is installed.

Files hold JSON Schemas with documents, one JSON object a line, gzipped or not: ``{"schema": ..., "tests": [{"data":
..., "valid": ...}]}``, or such objects under ``groups``. Both compilers take turns on every schema, with the same
vocabulary, and read every document in one layout, ``{"a": 1, "b": [2, 3]}``. Times are of the CPU.

The official suite has required files and optional ones, which are counted apart; a file of draft 7 is read as such. Its
tests of formats that are no more than annotations contradict those of formats that hold: they are left out.
"""

import gzip
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from benchmarks.common import EMBEDDED
from neaptide.models.grammars import GrammarError, Grammars
from neaptide.server.structured.grammars import answer_grammar, schema_part
from neaptide.server.structured.schemas import SchemaError

OLD_DIALECT = "http://json-schema.org/draft-07/schema#"
ANNOTATION = "only an annotation by default"

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


class Case(NamedTuple):
    part: str
    """``required``, ``optional``, or empty if the file has no parts."""
    schema: Any
    documents: list[Any]
    are_valid: list[bool]


def cases_of(path: Path) -> Iterator[Case]:
    content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    for line in content.splitlines():  # of bytes: text has ends of lines of its own
        file = json.loads(line)
        name = file.get("file", "")
        part = "" if not name else "optional" if name.startswith("optional/") else "required"
        for case in file.get("groups", [file]):
            schema = case["schema"]
            if "draft7" in path.name and isinstance(schema, dict):
                schema = {"$schema": OLD_DIALECT} | schema
            tests = [test for test in case["tests"] if ANNOTATION not in test.get("description", "")]
            yield Case(part, schema, [test["data"] for test in tests], [test["valid"] for test in tests])


class Tally:
    """What one compiler made of the cases."""

    def __init__(self, compiler: Compiler) -> None:
        self._compiler = compiler
        self._counts: Counter[str] = Counter()
        self._times_ms: list[float] = []

    def add(self, case: Case, documents: list[list[int]]) -> None:
        start_s = time.process_time()
        try:
            accepts = self._compiler(case.schema)
        except RefusedError:
            self._counts["refused"] += 1
            return
        self._times_ms.append(1e3 * (time.process_time() - start_s))
        for is_valid, tokens in zip(case.are_valid, documents, strict=True):
            kind, end = "valid" if is_valid else "invalid", "accepted" if accepts(tokens) else "rejected"
            self._counts[f"{kind}_{end}"] += 1

    def summary(self) -> dict[str, float]:
        times_ms = sorted(self._times_ms)
        kinds = ("refused", "valid_accepted", "valid_rejected", "invalid_rejected", "invalid_accepted")
        compile_ms = {
            f"compile_ms_{name}": times_ms[min(int(share * len(times_ms)), len(times_ms) - 1)]
            for name, share in {"p50": 0.5, "p95": 0.95, "max": 1.0}.items()
        }
        valid = self._counts["valid_accepted"] + self._counts["valid_rejected"]
        share = self._counts["valid_rejected"] / max(valid, 1)
        counts = {kind: self._counts[kind] for kind in kinds}
        return {"held": len(times_ms), **counts, "share_of_valid_rejected": share, **compile_ms}


def measure_cases(path: Path) -> dict[str, dict[str, float]]:
    """By compiler, and by part where the file has parts."""
    tokenizer = Tokenizer.from_file(str(EMBEDDED / "tokenizer.json"))
    compilers_by_name = compilers()
    tallies: dict[str, Tally] = {}
    for case in cases_of(path):
        texts = [json.dumps(document, ensure_ascii=False) for document in case.documents]
        documents = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
        for name, compiler in compilers_by_name.items():
            whose = f"{name}, {case.part}" if case.part else name
            tallies.setdefault(whose, Tally(compiler)).add(case, documents)
    return {name: tally.summary() for name, tally in tallies.items()}
