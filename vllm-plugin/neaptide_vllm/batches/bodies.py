"""Batch lines that vLLM's own endpoints run: checked for their form only, and measured for the pool.

vLLM renders, tokenizes and refuses a line when it runs, as it does a chat. The pool needs a prompt's length and the
prefix that it shares with other prompts, not its tokens. So four bytes of a prompt's JSON stand for a token: this takes
no tokenizer and holds for every model that vLLM has.
"""

import hashlib
from typing import Any, NoReturn, TypeGuard

import msgspec
import numpy as np

from neaptide.engine.params import SamplingParams
from neaptide.server.batches.lines import Assembler, CompiledLine
from neaptide.server.batches.served import Abilities, Served

BYTES_PER_TOKEN = 4
MEDIA_TOKENS = 256
"""Tokens that stand for an image or another attachment. Equal attachments have equal tokens."""
DEFAULT_ANSWER_TOKENS = 256
"""Expected answer of a line that sets no limit, until lines of its batch have ended."""
_PROMPT_FIELDS = {
    "/v1/chat/completions": ("tools", "messages"),
    "/v1/completions": ("prompt",),
    "/v1/responses": ("tools", "instructions", "input"),
}
_LIMIT_FIELDS = ("max_completion_tokens", "max_output_tokens", "max_tokens")


class BodyCompiler(msgspec.Struct, frozen=True):
    """Implements ``LineCompiler`` for a server of these models. It is its own recipe for the checking process."""

    names: tuple[str, ...]
    """Names of the model and of its adapters; the first is the server's own."""

    @property
    def served(self) -> Served:
        """As in ``LineCompiler``. A batch goes on with any weights of that name: nothing of them is stored."""
        return Served(self.names, f"bodies {self.names[0]}")

    def on(self, abilities: Abilities) -> "BodyCompiler":
        """As in ``LineCompiler``."""
        return self

    def compile(self, endpoint: str, body: dict[str, Any]) -> CompiledLine:
        """As in ``LineCompiler``; refuses nothing."""
        prompt = prompt_of([_without_media(body.get(name)) for name in _PROMPT_FIELDS[endpoint]])
        return CompiledLine([prompt], [SamplingParams(max_tokens=_most_answer_tokens(body))], wants_stream=False)

    def stored_assembler(self, reply: bytes) -> NoReturn:
        """As in ``LineCompiler``; vLLM assembles the replies."""
        raise ValueError("no reply is stored")

    def assembler(self, endpoint: str, body: dict[str, Any]) -> Assembler:
        """As in ``LineCompiler``; vLLM assembles the replies."""
        raise NotImplementedError


def prompt_of(value: object) -> list[int]:
    """Numbers that stand for a prompt's tokens; prompts that begin alike have numbers that begin alike."""
    data = msgspec.json.encode(value)
    data += bytes(-len(data) % BYTES_PER_TOKEN)
    found: list[int] = (np.frombuffer(data, "<u4") & 0x7FFF_FFFF).tolist()
    return found


def _without_media(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_media(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_without_media(inner) for inner in value]
    if isinstance(value, str) and value.startswith("data:"):
        digest = hashlib.sha256(value.encode(errors="replace")).hexdigest()
        return digest * (MEDIA_TOKENS * BYTES_PER_TOKEN // len(digest))
    return value


def _most_answer_tokens(body: dict[str, Any]) -> int:
    """Limit of all answers of the line together, as far as it can be read."""
    limit = next((found for name in _LIMIT_FIELDS if _is_count(found := body.get(name))), DEFAULT_ANSWER_TOKENS)
    choices = body.get("n")
    return limit * choices if _is_count(choices) else limit


def _is_count(value: object) -> TypeGuard[int]:
    return type(value) is int and 0 < value < 1 << 20
