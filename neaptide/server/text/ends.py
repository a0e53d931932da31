"""Tokens that end an output, from every file that names one.

A fine-tune often has the configuration of its base model, and its own end token in the tokenizer's files alone.
"""

from dataclasses import dataclass

from neaptide.models.config import ModelFacts
from neaptide.server.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class EndTokens:
    """The end tokens of a model."""

    sources: dict[int, tuple[str, ...]]
    """Where each token is named, by its id."""

    @property
    def ids(self) -> tuple[int, ...]:
        return tuple(self.sources)

    @classmethod
    def of(cls, model: ModelFacts, tokenizer: Tokenizer) -> "EndTokens":
        found: dict[int, list[str]] = {token: ["config"] for token in model.eos_token_ids}
        named = tokenizer.named_tokens.get("eos_token")
        others = {
            "tokenizer": None if named is None else tokenizer.token_id(named),
            "template": tokenizer.end_of_turn(),
        }
        for source, token in others.items():
            # A model cannot emit tokens outside its vocabulary, and masks have no bit for them.
            if token is not None and token < model.vocab_size:
                found.setdefault(token, []).append(source)
        return cls({token: tuple(where) for token, where in found.items()})

    def described(self, tokenizer: Tokenizer) -> str:
        """The tokens with their sources, for the log."""
        if not self.sources:
            return "none is named: outputs end at their token limit only"
        return ", ".join(f"{tokenizer.token_string(token)} ({', '.join(at)})" for token, at in self.sources.items())
