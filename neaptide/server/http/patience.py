"""Longest wait of best-effort work for its first token.

After its read timeout, a client sends the same request again while the first one still waits. So the server refuses the
first one just before that.
"""

import asyncio
import math
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TypeVar

from starlette.datastructures import Headers

from neaptide.server.http.errors import OverloadedError

_SHARE = 0.9
"""Part of the client's timeout that is used, because the reply takes time to reach it."""
_RETRY_AFTER_S = 30

_T = TypeVar("_T")


def patience_s(headers: Headers, cap_s: float) -> float:
    """Seconds until the first token must have come. The SDK sends its read timeout in a header."""
    try:
        asked_s = float(headers.get("x-stainless-read-timeout", ""))
    except ValueError:
        asked_s = cap_s
    return _SHARE * (min(asked_s, cap_s) if math.isfinite(asked_s) and asked_s > 0 else cap_s)


async def first_within(outputs: AsyncGenerator[_T, None], limit_s: float | None) -> AsyncGenerator[_T, None]:
    """All outputs, if the first comes within the limit; None is no limit.

    Raises:
        OverloadedError: it did not, and ``outputs`` has been closed.
    """
    async with aclosing(outputs):
        try:
            async with asyncio.timeout(limit_s):
                first = await anext(outputs)
        except TimeoutError:
            raise OverloadedError(online=False, retry_after_s=_RETRY_AFTER_S) from None
        yield first
        async for output in outputs:
            yield output
