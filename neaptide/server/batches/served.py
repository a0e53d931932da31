"""Model and abilities of a server, which decide which batch lines it can run."""

from typing import TypeGuard

import msgspec

MAX_NAME_CHARS = 255
NO_LIMIT = 2**31 - 1


class Abilities(msgspec.Struct, frozen=True):
    """Abilities that decide whether a server can run a line of its model. Servers of one model may differ."""

    max_model_len: int = NO_LIMIT
    """Most tokens of prompt and answer together."""
    follows_grammars: bool = True
    max_masked_ends: int | None = None
    """As in ``ServingContext``; None: any number."""

    def covers(self, other: "Abilities") -> bool:
        """Whether a server with these abilities runs every line that one with the others can run."""
        ends, others_ends = (NO_LIMIT if one.max_masked_ends is None else one.max_masked_ends for one in (self, other))
        return (
            self.max_model_len >= other.max_model_len
            and self.follows_grammars >= other.follows_grammars
            and ends >= others_ends
        )


class Served(msgspec.Struct, frozen=True):
    """One server's model and abilities."""

    names: tuple[str, ...]
    """Names of the model in requests; the first is its own."""
    fingerprint: str
    """Fingerprint of model and tokenizer. Prompts tokenized under another one must not run."""
    abilities: Abilities = Abilities()
    eos_token_ids: tuple[int, ...] = ()
    """The model's own stop tokens."""


def is_model_name(name: object) -> TypeGuard[str]:
    """Whether a server may serve a model of that name: it is a text that the database can store."""
    return isinstance(name, str) and 0 < len(name) <= MAX_NAME_CHARS and "\0" not in name


class _Body(msgspec.Struct):
    model: str


class _ServedLine(msgspec.Struct):
    body: _Body


_decoder = msgspec.json.Decoder(_ServedLine)


def named_model(line: bytes) -> str | None:
    """The model named by a line of a batch file; None if a quick parse does not find it."""
    try:
        name = _decoder.decode(line.removeprefix(b"\xef\xbb\xbf")).body.model
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    return name if is_model_name(name) else None
