"""Reads what the router needs to know about a request, exactly as its replica will read it."""

from collections.abc import Callable, Sequence
from functools import partial

from starlette.datastructures import Headers

from neaptide.cluster.routing import Prompt
from neaptide.engine.params import RequestClass, request_class
from neaptide.server.context import ServingContext
from neaptide.server.http.auth import KeyRing, Principal
from neaptide.server.http.errors import ApiError
from neaptide.server.http.jsonbody import parse_object
from neaptide.server.openai.prepare import prepare

ANYWHERE = Prompt(0)
"""Prompt of offline work, which has no TTFT target, and of requests that a replica will refuse."""
HashBlocks = Callable[[Sequence[int], int, bytes], list[bytes]]
"""Hashes of the full blocks of token ids, for a block size and a cache salt."""


class PromptReader:
    def __init__(self, context: ServingContext, keys: KeyRing, hash_blocks: HashBlocks) -> None:
        self._context = context
        self._keys = keys
        self._hash_blocks = hash_blocks

    async def read(self, endpoint: str, raw: bytes, headers: Headers, block_size: int) -> Prompt:
        """The prompt of a request's body. It is read in a thread, because tokenizing takes time."""
        try:
            principal = self._keys.identify(headers.get("authorization"), headers.get("api-key"))
            work = partial(self._read, endpoint, raw, principal, block_size)
            return await self._context.bodies.run(work, len(raw), principal.share)
        except ApiError:
            return ANYWHERE

    def _read(self, endpoint: str, raw: bytes, principal: Principal, block_size: int) -> Prompt:
        prepared = prepare(endpoint, parse_object(raw), self._context, principal.tier)
        if request_class(prepared.tier) is RequestClass.OFFLINE:
            return ANYWHERE
        longest = max(prepared.prompts, key=len)
        salt = principal.salt_for(prepared.cache_salt)
        hashes = self._hash_blocks(longest, block_size, salt) if block_size else []
        return Prompt.of(sum(map(len, prepared.prompts)), hashes, block_size)
