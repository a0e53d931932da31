"""A line compiler without a tokenizer. Imports next to nothing: processes that a test starts use it as well."""

from dataclasses import replace
from typing import Any

import msgspec

from neaptide.engine.messages import RequestOutput
from neaptide.engine.params import SamplingParams
from neaptide.server.batches.lines import Assembler, CompiledLine, LineCompiler
from neaptide.server.batches.served import NO_LIMIT, Abilities, Served
from neaptide.server.http.errors import ApiError, ContextLengthError, InvalidRequestError


class FakeForm(msgspec.Struct, frozen=True):
    n: int
    prompt_tokens: int
    watch: bool

    @classmethod
    def of(cls, line: CompiledLine) -> "FakeForm":
        return cls(len(line.prompts), len(line.prompts[0]), line.wants_stream)


class FakeAssembler:
    """Text is the tokens as characters; ``!`` ends a choice as a stop string would."""

    def __init__(self, form: "FakeForm") -> None:
        self._prompt_tokens = form.prompt_tokens
        self._texts = [""] * form.n
        self._done = [False] * form.n
        self.stop_hit = [False] * form.n
        self._watch = form.watch
        self.error: ApiError | None = None

    def feed(self, choice_index: int, output: RequestOutput) -> None:
        if self._done[choice_index]:
            return
        self._texts[choice_index] += "".join(map(chr, output.new_token_ids))
        if self._watch and "!" in self._texts[choice_index]:
            self.stop_hit[choice_index] = True
        self._done[choice_index] = self.stop_hit[choice_index] or output.finish_reason is not None

    @property
    def finished(self) -> bool:
        return all(self._done)

    def body(self, request_id: str) -> dict[str, Any]:
        if self._texts[0] == "explode":
            raise RuntimeError("a bug in the assembler")
        completion_tokens = sum(map(len, self._texts))
        return {
            "id": request_id,
            "choices": [{"index": i, "text": text} for i, text in enumerate(self._texts)],
            "usage": {
                "prompt_tokens": self._prompt_tokens,
                "completion_tokens": completion_tokens,
                "prompt_tokens_details": {"cached_tokens": 1},
            },
        }


class FakeCompiler:
    """A byte is a token; a temperature above 2 is refused, as a real endpoint would, and so is a prompt that fills the
    context. Without ``stores_replies`` it compiles as versions before the reply file."""

    names: tuple[str, ...] = ("m", "m2")

    def __init__(
        self,
        fingerprint: str = "fake",
        names: tuple[str, ...] = names,
        max_model_len: int = NO_LIMIT,
        *,
        stores_replies: bool = True,
    ) -> None:
        self.served = Served(names, fingerprint, Abilities(max_model_len))
        self._stores_replies = stores_replies
        self.num_prepared_again = 0
        """Lines of which only the body said what is to be answered."""

    def on(self, abilities: Abilities) -> LineCompiler:
        served, stores_replies = self.served, self._stores_replies
        return FakeCompiler(served.fingerprint, served.names, abilities.max_model_len, stores_replies=stores_replies)

    def compile(self, endpoint: str, body: dict[str, Any]) -> CompiledLine:
        if body.get("temperature", 0) > 2:
            raise InvalidRequestError("Too hot.", param="temperature", code="invalid_value")
        prompt = list(body["messages"][-1]["content"].encode())
        n, wanted = body.get("n", 1), body.get("max_tokens", 16)
        room = self.served.abilities.max_model_len - len(prompt)
        if room < 1:
            raise ContextLengthError(f"The context holds {self.served.abilities.max_model_len}.", param="messages")
        params = [SamplingParams(max_tokens=min(wanted, room)) for _ in range(n)]
        line = CompiledLine([prompt] * n, params, "stop" in body, is_cut="max_tokens" in body and wanted > room)
        if not self._stores_replies:
            return line
        return replace(line, reply=msgspec.msgpack.encode(FakeForm.of(line)))

    def stored_assembler(self, reply: bytes) -> Assembler:
        return FakeAssembler(msgspec.msgpack.decode(reply, type=FakeForm))

    def assembler(self, endpoint: str, body: dict[str, Any]) -> Assembler:
        self.num_prepared_again += 1
        return FakeAssembler(FakeForm.of(self.on(Abilities()).compile(endpoint, body)))
