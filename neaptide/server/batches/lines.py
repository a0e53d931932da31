"""Where the batch plane meets the request plane: a line's body in, prompts out; outputs in, a response out.

The rest of the batch plane knows only these protocols, so its tests need neither tokenizer nor model.
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
from neaptide.server.edge.errors import ApiError
from neaptide.server.link.engine_client import EngineClient
from neaptide.server.openai.prepare import prepare
from neaptide.server.openai.reply_form import Reply, decode_form, encode_form
from neaptide.server.openai.respond import ResponseAssembler
from neaptide.server.structured.constraints import ensure_held
from neaptide.server.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class CompiledLine:
    """What the engine needs of a line: one prompt and one set of parameters for each choice."""

    prompts: Sequence[list[int]]
    params: Sequence[SamplingParams]
    wants_stream: bool
    """The body has stop strings: tokens are wanted at every step, so that the row can be stopped in time."""
    is_cut: bool = False
    """The body asks for longer answers than the server's context leaves."""
    reply: bytes | None = None
    """What ``LineCompiler.stored_assembler`` makes the response of; None: only the body says it."""


class Assembler(Protocol):
    """Collects the outputs of a line's choices into one response body."""

    def feed(self, choice_index: int, output: RequestOutput) -> object: ...

    @property
    def stop_hit(self) -> Sequence[bool]:
        """For each choice: a stop string ended it, and what the engine still makes of it is not wanted."""
        ...

    @property
    def finished(self) -> bool: ...

    @property
    def error(self) -> ApiError | None:
        """Why there is no body."""
        ...

    def body(self, request_id: str) -> Mapping[str, Any]: ...


class LineCompiler(Protocol):
    """Called in worker threads."""

    @property
    def served(self) -> Served:
        """The server's model and abilities."""
        ...

    def on(self, abilities: Abilities) -> "LineCompiler":
        """The compiler of a server that has the same model and these abilities."""
        ...

    def compile(self, endpoint: str, body: dict[str, Any]) -> CompiledLine:
        """Raises ApiError exactly where the synchronous endpoint would answer with that error."""
        ...

    def stored_assembler(self, reply: bytes) -> Assembler:
        """Of a line whose ``CompiledLine.reply`` was stored. Raises ValueError where it cannot be read."""
        ...

    def assembler(self, endpoint: str, body: dict[str, Any]) -> Assembler:
        """For a line that has been compiled once, of which nothing is stored: its grammar is not compiled again."""
        ...


class ContextCompiler:
    """The compiler of a running server: batch lines go the same way as online requests."""

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
        """Raises ApiError as the synchronous endpoint would."""
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
        """Raises ApiError as the synchronous endpoint of an able server would: an abler one than this may have checked
        the line."""
        return ResponseAssembler.of(prepare(endpoint, body, self._unlimited, Tier.BATCH))

    def recipe(self) -> "Recipe":
        """What makes the same compiler in another process."""
        known = {name: getattr(self._context, name) for name in Recipe.__struct_fields__ if name != "tokenizer_dir"}
        return Recipe(tokenizer_dir=str(self._context.tokenizer.directory), **known)


class Recipe(msgspec.Struct, frozen=True, kw_only=True):
    """What a ``ContextCompiler`` depends on, as data; fields as in ``ServingContext``."""

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

    def compiler(self) -> ContextCompiler:
        """A compiler that only compiles: no engine is behind it."""
        known = {name: getattr(self, name) for name in self.__struct_fields__ if name != "tokenizer_dir"}
        tokenizer = Tokenizer(Path(self.tokenizer_dir))
        return ContextCompiler(ServingContext(tokenizer=tokenizer, client=EngineClient(), **known))
