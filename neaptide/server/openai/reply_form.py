"""What the reply to a request needs of it, once the engine has its tokens and its sampling parameters."""

from dataclasses import dataclass

import msgspec

from neaptide.server.context import ServingContext
from neaptide.server.openai.endpoints import COMPLETIONS
from neaptide.server.openai.replies import TierName
from neaptide.server.openai.responses.replies import Asked


class EchoedPrompt(msgspec.Struct, frozen=True):
    """A prompt that the reply repeats."""

    text: str
    token_ids: list[int] = []
    """Empty unless the reply scores them."""


class ReplyForm(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Form of one reply. Data alone: that of a batch line is stored when the line is checked.

    A field of a later version makes it unreadable for an earlier one, which then prepares the line again.
    """

    endpoint: str
    model: str
    """The id that the reply names."""
    service_tier: TierName = "flex"
    """What the reply says of the tier."""
    n: int = 1
    """Choices for each prompt."""
    num_prompts: int = 1
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    stop_token_ids: tuple[int, ...] = ()
    """Named by the request: the reply says which of them ended a choice."""
    min_tokens: int = 0
    skip_special_tokens: bool = True
    return_token_ids: bool = False
    wants_logprobs: bool = False
    echoed: list[EchoedPrompt] = []
    """Each prompt where ``echo`` asks for it, else empty."""
    tools: tuple[str, ...] = ()
    """Functions that the model may call; where it is empty, output is not searched for calls."""
    parallel_tool_calls: bool = True
    is_forced: bool = False
    """Whether a grammar makes the output calls alone, in the format that the grammar has."""
    parameter_types: dict[str, dict[str, str]] = {}
    """JSON types of the tools' parameters, where the model's format needs them."""
    is_reasoning: bool = False
    """Whether the output begins inside reasoning, which the prompt has opened."""
    shows_reasoning: bool = True
    seals_reasoning: bool = False
    """Whether items of reasoning also have it as an opaque text, which some clients send back and the plain one not."""
    asked: Asked | None = None
    """What a reply of the Responses API repeats of the request."""

    @property
    def is_chat(self) -> bool:
        """Whether it is a conversation, and not a text to go on with."""
        return self.endpoint != COMPLETIONS

    @property
    def num_choices(self) -> int:
        """Engine requests that the request becomes; choice ``p * n + k`` is the k-th of prompt p."""
        return self.num_prompts * self.n


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(ReplyForm)


def encode_form(form: ReplyForm) -> bytes:
    """Equal forms are equal bytes."""
    return _encoder.encode(form)


def decode_form(encoded: bytes) -> ReplyForm:
    """Raises ValueError for what this version cannot read."""
    try:
        return _decoder.decode(encoded)
    except msgspec.DecodeError as error:
        raise ValueError(f"it is no form of a reply: {error}") from None


@dataclass(frozen=True, slots=True)
class Reply:
    """One reply that is to be given: its form, who gives it, and when it was begun."""

    form: ReplyForm
    context: ServingContext
    created: int
    """Unix seconds."""
