"""A line compiler without a tokenizer. Imports next to nothing: processes that a test starts use it as well."""

from typing import Any

from neaptide.engine.messages import RequestOutput
from neaptide.engine.params import SamplingParams
from neaptide.server.batches.lines import Assembler, CompiledLine, LineCompiler
from neaptide.server.batches.served import NO_LIMIT, Abilities, Served
from neaptide.server.edge.errors import ApiError, ContextLengthError, InvalidRequestError


class FakeAssembler:
    """Text is the tokens as characters; ``!`` ends a choice as a stop string would."""

    def __init__(self, line: CompiledLine) -> None:
        self._prompt_tokens = len(line.prompts[0])
        self._texts = ["" for _ in line.prompts]
        self._done = [False for _ in line.prompts]
        self.stop_hit = [False for _ in line.prompts]
        self._watch = line.wants_stream
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
    context."""

    names: tuple[str, ...] = ("m", "m2")

    def __init__(
        self, fingerprint: str = "fake", names: tuple[str, ...] = names, max_model_len: int = NO_LIMIT
    ) -> None:
        self.served = Served(names, fingerprint, Abilities(max_model_len))

    def on(self, abilities: Abilities) -> LineCompiler:
        return FakeCompiler(self.served.fingerprint, self.served.names, abilities.max_model_len)

    def compile(self, endpoint: str, body: dict[str, Any]) -> CompiledLine:
        if body.get("temperature", 0) > 2:
            raise InvalidRequestError("Too hot.", param="temperature", code="invalid_value")
        prompt = list(body["messages"][-1]["content"].encode())
        n, wanted = body.get("n", 1), body.get("max_tokens", 16)
        room = self.served.abilities.max_model_len - len(prompt)
        if room < 1:
            raise ContextLengthError(f"The context holds {self.served.abilities.max_model_len}.", param="messages")
        params = [SamplingParams(max_tokens=min(wanted, room)) for _ in range(n)]
        return CompiledLine([prompt] * n, params, "stop" in body, is_cut="max_tokens" in body and wanted > room)

    def assembler(self, endpoint: str, body: dict[str, Any]) -> Assembler:
        return FakeAssembler(self.on(Abilities()).compile(endpoint, body))
