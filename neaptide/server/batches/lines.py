"""Interface of batches to requests: a line's body becomes prompts, and outputs become a response.

The rest of the batch service knows only these protocols, so its tests need neither tokenizer nor model.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import msgspec

from neaptide.engine.messages import RequestOutput
from neaptide.engine.params import SamplingParams, Tier
from neaptide.server.batches.served import Abilities, Served
from neaptide.server.context import GenerationDefaults, ServingContext
from neaptide.server.engine_client.client import EngineClient
from neaptide.server.http.errors import ApiError
from neaptide.server.openai.prepare import prepare
from neaptide.server.openai.reply_form import Reply, decode_form, encode_form
from neaptide.server.openai.respond import ResponseAssembler
from neaptide.server.structured.constraints import ensure_held
from neaptide.server.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class CompiledLine:
    """Engine input of a line: one prompt and one set of parameters for each choice."""

    prompts: Sequence[list[int]]
    params: Sequence[SamplingParams]
    wants_stream: bool
    """Whether the body has stop strings. Tokens are then needed at every step, so that the row is stopped in time."""
    is_cut: bool = False
    """Whether the body asks for longer answers than the server's context allows."""
    reply: bytes | None = None
    """Data from which ``LineCompiler.stored_assembler`` builds the response; None if it needs the body."""


class Assembler(Protocol):
    """Collects the outputs of a line's choices into one response body."""

    def feed(self, choice_index: int, output: RequestOutput) -> object: ...

    @property
    def stop_hit(self) -> Sequence[bool]:
        """Whether each choice has ended with a stop string; its further output is not needed."""
        ...

    @property
    def finished(self) -> bool: ...

    @property
    def error(self) -> ApiError | None:
        """Why there is no body."""
        ...

    def body(self, request_id: str) -> Mapping[str, Any]: ...


class LineCompiler(Protocol):
    """Compiles lines. Called in worker threads."""

    @property
    def served(self) -> Served:
        """The server's model and abilities."""
        ...

    def on(self, abilities: Abilities) -> "LineCompiler":
        """The compiler of a server that has the same model and these abilities."""
        ...

    def compile(self, endpoint: str, body: dict[str, Any]) -> CompiledLine:
        """Compiles a line. Raises ApiError exactly where the synchronous endpoint would answer with that error."""
        ...

    def stored_assembler(self, reply: bytes) -> Assembler:
        """Assembler for a line whose ``CompiledLine.reply`` was stored. Raises ValueError where it cannot be read."""
        ...

    def assembler(self, endpoint: str, body: dict[str, Any]) -> Assembler:
        """Assembler for a line of which nothing is stored. The line was compiled once, so its grammar is not compiled
        again."""
        ...


class ContextCompiler:
    """Compiler of a running server: batch lines are prepared like online requests."""

    def __init__(self, context: ServingContext) -> None:
        self._context = context

    @cached_property
    def _unlimited(self) -> ServingContext:
        return self.on(Abilities())._context

    @property
    def served(self) -> Served:
        """As in ``LineCompiler``."""
        context = self._context
        return Served(
            (context.model_id, *context.model_aliases),
            f"{context.model_id} {context.fingerprint}",
            Abilities(context.max_model_len, context.follows_grammars, context.max_masked_ends),
            context.eos_token_ids,
        )

    def on(self, abilities: Abilities) -> "ContextCompiler":
        """As in ``LineCompiler``."""
        context = copy.copy(self._context)
        context.max_model_len = abilities.max_model_len
        context.follows_grammars = abilities.follows_grammars
        context.max_masked_ends = abilities.max_masked_ends
        return ContextCompiler(context)

    def compile(self, endpoint: str, body: dict[str, Any]) -> CompiledLine:
        """Prepares a line's body. Raises ApiError as the synchronous endpoint would."""
        prepared = prepare(endpoint, body, self._context, Tier.BATCH)
        if prepared.constraint is not None:
            ensure_held(prepared.constraint, self._context)
        params = [prepared.params_for(choice) for choice in range(prepared.num_choices)]
        reply = encode_form(prepared.form)
        return CompiledLine(prepared.requests, params, bool(prepared.form.stop), prepared.is_cut, reply)

    def stored_assembler(self, reply: bytes) -> Assembler:
        """As in ``LineCompiler``."""
        form = decode_form(reply)
        return ResponseAssembler(Reply(form, self._context, int(self._context.wall_clock())))

    def assembler(self, endpoint: str, body: dict[str, Any]) -> Assembler:
        """Prepares a line that may have been checked by a server with other abilities. Raises ApiError as that server
        would."""
        return ResponseAssembler.of(prepare(endpoint, body, self._unlimited, Tier.BATCH))

    def recipe(self) -> "Recipe":
        """The data that builds the same compiler in another process."""
        known = {name: getattr(self._context, name) for name in Recipe.__struct_fields__ if name != "tokenizer_dir"}
        return Recipe(tokenizer_dir=str(self._context.tokenizer.directory), **known)


class Recipe(msgspec.Struct, frozen=True, kw_only=True):
    """Inputs of a ``ContextCompiler`` as data; fields as in ``ServingContext``."""

    tokenizer_dir: str
    model_id: str
    created: int
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    model_aliases: tuple[str, ...]
    generation_defaults: GenerationDefaults
    ttft_slo_s: float
    tpot_slo_s: float
    follows_grammars: bool = True
    max_masked_ends: int | None = None
    engine_python: str | None = None
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"

    def compiler(self) -> ContextCompiler:
        """Builds a compiler without an engine."""
        known = {name: getattr(self, name) for name in self.__struct_fields__ if name != "tokenizer_dir"}
        tokenizer = Tokenizer(Path(self.tokenizer_dir), isolates_templates=True)
        return ContextCompiler(ServingContext(tokenizer=tokenizer, client=EngineClient(), **known))
