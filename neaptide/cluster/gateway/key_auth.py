"""The key with which a gateway asks its replicas."""

from collections.abc import Generator

import httpx

from neaptide.server.http.auth import KeyRing


class KeyAuth(httpx.Auth):
    """Sends the first accepted key, and the others in turn where that is refused.

    A changed key file reaches the gateway and its replicas within seconds of each other, not at once.
    """

    def __init__(self, ring: KeyRing) -> None:
        self._ring = ring

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        """As in ``httpx.Auth``."""
        keys = self._ring.keys
        if not keys:
            yield request
        for key in keys:
            request.headers["authorization"] = f"Bearer {key}"
            response = yield request
            if response.status_code != 401:
                return
