"""HEAD on every route that answers GET: the same reply without its body."""

from starlette.types import ASGIApp, Message, Receive, Scope, Send


class _Enough(Exception):
    """The headers have been sent; the rest of the route's reply is not needed."""


class HeadMiddleware:
    """Innermost middleware: the routes see a GET, the outer layers see the HEAD."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return

        async def send_without_body(message: Message) -> None:
            if message["type"] == "http.response.start":
                await send(message)
                return
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            if message.get("more_body", False):
                raise _Enough

        scope["method"] = "GET"
        try:
            await self._app(scope, receive, send_without_body)
        except _Enough:
            pass
        finally:
            scope["method"] = "HEAD"
