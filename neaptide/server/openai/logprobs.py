"""Log-probabilities in the API's two formats. JSON has no infinity, so values end at -9999."""

from collections.abc import Sequence
from typing import NamedTuple

from neaptide.engine.messages import TokenLogprobs
from neaptide.server.openai.replies import ChatLogprobs, CompletionLogprobs, TokenLogprob, TopLogprob
from neaptide.server.text.tokenizer import Tokenizer

LOWEST = -9999.0


class ScoredToken(NamedTuple):
    """One token of the output (or of an echoed prompt) with the engine's scores for its position."""

    token_id: int
    offset: int
    """Number of characters before this token."""
    logprobs: TokenLogprobs | None
    """None for the first prompt token, which has no condition."""


def _clamp(logprob: float) -> float:
    return logprob if logprob > LOWEST else LOWEST


def chat_logprobs(tokens: Sequence[ScoredToken], tokenizer: Tokenizer) -> ChatLogprobs:
    """Log-probabilities of a chat: ``{"content": [...], "refusal": null}``."""

    def entry(token_id: int, logprob: float) -> TopLogprob:
        raw = tokenizer.token_bytes(token_id)
        return {"token": tokenizer.token_text(token_id), "logprob": _clamp(logprob), "bytes": list(raw)}

    content: list[TokenLogprob] = []
    for token in tokens:
        if token.logprobs is None:
            continue
        found = token.logprobs
        tops = [entry(i, p) for i, p in zip(found.top_ids, found.top_logprobs, strict=True)]
        content.append({**entry(token.token_id, found.logprob), "top_logprobs": tops})
    return {"content": content, "refusal": None}


def completion_logprobs(tokens: Sequence[ScoredToken], tokenizer: Tokenizer) -> CompletionLogprobs:
    """Log-probabilities of a completion: four parallel lists."""
    return {
        "tokens": [tokenizer.token_text(token.token_id) for token in tokens],
        "token_logprobs": [None if t.logprobs is None else _clamp(t.logprobs.logprob) for t in tokens],
        "top_logprobs": [None if t.logprobs is None else _top_table(t.logprobs, tokenizer) for t in tokens],
        "text_offset": [token.offset for token in tokens],
    }


def _top_table(found: TokenLogprobs, tokenizer: Tokenizer) -> dict[str, float]:
    """Scores by token text, best first; the chosen token is included. Tokens with equal text keep the better value."""
    table: dict[str, float] = {}
    for token_id, logprob in zip(found.top_ids, found.top_logprobs, strict=True):
        table.setdefault(tokenizer.token_text(token_id), _clamp(logprob))
    table.setdefault(tokenizer.token_text(found.token_id), _clamp(found.logprob))
    return table
