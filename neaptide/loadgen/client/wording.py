"""Makes prompts of given lengths in the server's own tokens, which it learns over HTTP.

A prompt is a sequence of words that the server's tokenizer maps to one token each. So the number of words is the number
of tokens, and equal beginnings stay equal. A server that cannot tokenize gets prompts of two lengths with answers of
one token. Its token counts give a mean per word, and lengths are then approximate.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from neaptide.loadgen.workloads.traces import FIRST_TOKEN_ID, Segments, token_ids

PROBE_WORDS = 64
LEAST_WORDS = 16
"""Minimum number of one-token words for distinct prompts; with fewer, the mean over all words is used."""
_COMMON = """
the of and to in is you that it he was for on are as with his they at be this have from or one had by word but not
what all were we when your can said there use an each which she do how their if will up other about out many then them
these so some her would make like him into time has look two more write go see number no way could people my than
first water been call who oil its now find long down day did get come made may part over new sound take only little
work know place year live me back give most very after thing our just name good man think say great where help through
much before line right too mean old any same tell boy follow came want show also around form three small set put end
does another well large must big even such because turn here why ask went men read need land home us move try kind
hand picture again change off play spell air away animal house point page letter mother answer found study still learn
should world high every near add food between own below country plant last school father keep tree never start city
earth eye light thought head under story saw left few while along might close something seem next hard open example
begin life always those both paper together got group often run
"""
WORDS = tuple(_COMMON.split())
LEAD = WORDS[0]
"""Every prompt begins with it, because many words need more tokens at the very beginning than after a space."""


@dataclass(slots=True, frozen=True)
class Wording:
    """How the server counts tokens."""

    words: Sequence[str]
    tokens_per_word: float = 1.0
    overhead_tokens: int = 0
    """Tokens of a prompt with only the first word: that word, a chat template, a token that begins the text."""
    exact: bool = True

    def text(self, segments: Segments) -> str:
        """A prompt with these lengths and at least one word; segments with equal content ids get equal words."""
        scaled = tuple((content, max(1, round(tokens / self.tokens_per_word))) for content, tokens in segments)
        total = sum(tokens for _, tokens in segments)
        count = max(0, round((total - self.overhead_tokens) / self.tokens_per_word))
        picked = token_ids(scaled, len(self.words) + FIRST_TOKEN_ID)[:count] - FIRST_TOKEN_ID
        return " ".join([LEAD, *(self.words[k] for k in picked.tolist())])


@dataclass(slots=True, frozen=True)
class Counting:
    """Learns how a server counts tokens."""

    http: httpx.AsyncClient
    model: str
    is_chat: bool

    async def wording(self) -> Wording:
        """Raises httpx.HTTPError if the server supports neither way."""
        response = await self.http.post("/tokenize", json={"model": self.model, "prompt": LEAD})
        if not response.is_success:
            return await self._by_usage()
        first = await self._count(LEAD)
        overhead = await self._count_prompt(LEAD)
        words = await self._of_one_token(WORDS, first)
        if len(words) >= LEAST_WORDS:
            return Wording(words, 1.0, overhead)
        mean = (await self._count(" ".join([LEAD, *WORDS])) - first) / len(WORDS)
        return Wording(WORDS, mean, overhead, exact=False)

    async def _of_one_token(self, words: Sequence[str], first: int) -> Sequence[str]:
        """The words that are one token each after another word: all of them, or found by halving."""
        if await self._count(" ".join([LEAD, *words])) - first == len(words):
            return words
        if len(words) == 1:
            return ()
        half = len(words) // 2
        return (*await self._of_one_token(words[:half], first), *await self._of_one_token(words[half:], first))

    async def _count(self, text: str) -> int:
        return await self._tokenize({"prompt": text, "add_special_tokens": False})

    async def _count_prompt(self, text: str) -> int:
        """Tokens of the prompt including everything around the text."""
        whole: dict[str, Any] = {"messages": [{"role": "user", "content": text}]} if self.is_chat else {"prompt": text}
        return await self._tokenize(whole)

    async def _tokenize(self, body: dict[str, Any]) -> int:
        response = await self.http.post("/tokenize", json={"model": self.model} | body)
        return int(response.raise_for_status().json()["count"])

    async def _by_usage(self) -> Wording:
        few, many = await self._usage(PROBE_WORDS), await self._usage(2 * PROBE_WORDS)
        tokens_per_word = (many - few) / PROBE_WORDS
        overhead = round(few - (PROBE_WORDS - 1) * tokens_per_word)
        return Wording(WORDS, tokens_per_word, overhead, exact=False)

    async def _usage(self, count: int) -> int:
        text = " ".join(WORDS[k % len(WORDS)] for k in range(count))
        body: dict[str, Any] = {"model": self.model, "max_tokens": 1}
        body |= {"messages": [{"role": "user", "content": text}]} if self.is_chat else {"prompt": text}
        path = "/v1/chat/completions" if self.is_chat else "/v1/completions"
        response = await self.http.post(path, json=body)
        return int(response.raise_for_status().json()["usage"]["prompt_tokens"])
