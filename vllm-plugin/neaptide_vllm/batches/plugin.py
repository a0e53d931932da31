"""The endpoint plug-in: ``/v1/files`` and ``/v1/batches`` beside vLLM's own routes, and ``service_tier`` on those.

The store, the checks, the resume and the results are the batch service's. vLLM's application runs the lines.
"""

import asyncio
import logging
import os
import time
from argparse import Namespace
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from prometheus_client import REGISTRY
from starlette.datastructures import Headers, State
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Receive, Scope, Send

from neaptide.engine.messages import EngineReady
from neaptide.server.batches.checking.worker import CheckerPool, WorkerChecker
from neaptide.server.batches.metrics import REFRESH_S, BatchMetrics
from neaptide.server.batches.service import BatchService
from neaptide.server.batches.storing.data_dir import StoreError
from neaptide.server.engine_client.client import EngineClient
from neaptide.server.http.auth import ANONYMOUS, principal_for
from neaptide.server.http.body_threads import BodyThreads
from neaptide.server.http.error_replies import error_response, install_handlers
from neaptide.server.http.errors import UnavailableError
from neaptide.server.routes.batches import batches_router
from neaptide.server.routes.files import files_router
from neaptide_vllm.batches import checking
from neaptide_vllm.batches.bodies import BodyCompiler
from neaptide_vllm.batches.engine_end import EngineEnd, VllmClient
from neaptide_vllm.batches.line_app import LineApp
from neaptide_vllm.batches.line_pool import LinePool
from neaptide_vllm.batches.link import VllmLink
from neaptide_vllm.batches.middleware import RequestMiddleware
from neaptide_vllm.batches.settings import batch_settings, key_weights

logger = logging.getLogger(__name__)

PATHS = ("/v1/files", "/v1/batches")
FREE_SHARE = 1 / 8
"""Fraction of vLLM's slots and KV cache that lines leave free, so that a chat finds room at once."""


def is_ours(path: str) -> bool:
    return any(path == ours or path.startswith(ours + "/") for ours in PATHS)


class OurPaths(BaseRoute):
    """Passes requests for our paths to an application of their own: replies to errors there are not vLLM's."""

    def __init__(self) -> None:
        self.app: ASGIApp | None = None

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        found = self.app is not None and scope["type"] == "http" and is_ours(_route_path(scope))
        return (Match.FULL if found else Match.NONE), {}

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert self.app is not None
        await self.app(scope, receive, send)


class BatchesPlugin:
    """vLLM makes one in each API process: it attaches the routes, then gives the engine and the arguments."""

    name = "neaptide_batches"
    required_tasks = ("generate",)

    def __init__(self) -> None:
        self._route = OurPaths()
        self._app: FastAPI | None = None
        self._engine: VllmClient | None = None
        self._engine_end: EngineEnd | None = None
        self._service: BatchService | None = None
        self._client = EngineClient()
        self._weights: dict[str, float] = {}
        self._link: VllmLink | None = None
        self._series: BatchMetrics | None = None
        self._refreshing: asyncio.Task[None] | None = None

    def attach_router(self, app: FastAPI) -> None:
        """Registers routes and middleware; called while the application is built."""
        _log_as_vllm_does()
        self._app = app
        app.router.routes.append(self._route)
        app.add_middleware(RequestMiddleware)
        app.router.lifespan_context = self._around(app.router.lifespan_context)

    async def init_state(self, engine_client: VllmClient | None, state: State, args: Namespace) -> None:
        """Opens the data directory; called when the engine is ready."""
        assert self._app is not None
        if engine_client is None:
            return
        others = {path for route in self._app.routes if is_ours(path := getattr(route, "path", ""))}
        if others:
            logger.warning(
                "neaptide_batches is off: another plug-in has %s; leave one of them out of VLLM_PLUGINS",
                ", ".join(sorted(others)),
            )
            return
        rank = engine_client.vllm_config.parallel_config._api_process_rank
        if rank > 0:
            self._route.app = _refusing("API process 0")
            logger.info("neaptide_batches: API process 0 serves files and batches, not this one, %d", rank)
            return
        models = state.openai_serving_models
        names = [path.name for path in models.base_model_paths] + list(models.lora_requests)
        compiler = BodyCompiler(tuple(names))
        try:
            self._weights = key_weights()
            service = BatchService(
                batch_settings(),
                self._client,
                compiler,
                CheckerPool(partial(WorkerChecker, compiler, module=checking.MODULE)),
            )
            await service.start()
        except (StoreError, ValueError) as error:
            raise SystemExit(f"neaptide_batches: {error}") from None
        self._service, self._engine = service, engine_client
        has_keys = any(args.api_key or [os.environ.get("VLLM_API_KEY")])
        self._route.app = files_and_batches(service, has_keys)
        logger.info("files and batches are in %s, for %s", service.settings.data_dir, ", ".join(names))

    def _around(self, theirs: Any) -> Any:
        """vLLM's lifespan with ours inside: its state is gone when its own ends."""

        @asynccontextmanager
        async def lifespan(app: Any) -> AsyncIterator[Any]:
            async with theirs(app) as state:
                self._begin()
                try:
                    yield state
                finally:
                    await self._end()

        return lifespan

    def _begin(self) -> None:
        if self._service is None or self._engine is None or self._app is None:
            return
        config, end = self._engine.vllm_config, EngineEnd(self._engine)
        self._engine_end = end
        slots = config.scheduler_config.max_num_seqs
        kv_tokens = (config.cache_config.num_gpu_blocks or 0) * config.cache_config.block_size
        most_lines, most_tokens = max(1, slots - int(slots * FREE_SHARE)), int(kv_tokens * (1 - FREE_SHARE))
        pool = LinePool(most_lines, most_tokens, self._weights)
        self._link = VllmLink(LineApp(self._app), self._client, pool, lambda: end.is_near)
        self._client.attach(self._link, _ready(config))
        self._series = BatchMetrics(REGISTRY, self._service.store, time.time, self._service.outlooks)
        self._refreshing = asyncio.create_task(_refresh(self._series), name="batch series")

    async def _end(self) -> None:
        if self._service is None or self._link is None or self._engine_end is None:
            return
        assert self._series is not None
        assert self._refreshing is not None
        self._refreshing.cancel()
        await asyncio.gather(self._refreshing, return_exceptions=True)
        REGISTRY.unregister(self._series)
        open_lines = self._link.open_lines
        await self._link.close()
        # vLLM ends with its engine. The next server looks for the line that ended it, one group after another.
        self._client.detach(open_lines if self._engine_end.was_a_crash else ())
        await self._service.stop()


def files_and_batches(service: BatchService, has_keys: bool) -> ASGIApp:
    """The application of our paths."""
    app = FastAPI(redirect_slashes=False, docs_url=None, redoc_url=None, openapi_url=None)
    app.state.context = SimpleNamespace(bodies=BodyThreads())
    install_handlers(app, RequestValidationError)
    app.include_router(files_router(service))
    app.include_router(batches_router(service))
    return Callers(app, has_keys)


async def _refresh(series: BatchMetrics) -> None:
    """Keeps the series of vLLM's ``/metrics`` fresh."""
    while True:
        await series.refresh()
        await asyncio.sleep(REFRESH_S)


class Callers:
    """Tells whose a request is, by its key, which vLLM has accepted before."""

    def __init__(self, app: ASGIApp, has_keys: bool) -> None:
        self._app, self._has_keys = app, has_keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        key = Headers(scope=scope).get("authorization", "").partition(" ")[2]
        principal = principal_for(key) if self._has_keys else ANONYMOUS
        scope = {**scope, "state": {**scope.get("state", {}), "principal": principal}}
        await self._app(scope, receive, send)


def _refusing(owner: str) -> ASGIApp:
    """Refuses files and batches, in the API processes that do not own them."""
    # A client that tries again should reach another process, so the connection is not kept.
    error = UnavailableError(f"Files and batches are served by {owner} of this server, not by this one.")
    error.headers["connection"] = "close"
    return error_response(error)


def _log_as_vllm_does() -> None:
    """Gives our log lines vLLM's handlers: its configuration covers its own names only."""
    theirs = logging.getLogger("vllm")
    for name in ("neaptide", "neaptide_vllm"):
        ours = logging.getLogger(name)
        ours.handlers, ours.propagate = theirs.handlers, False
        ours.setLevel(theirs.getEffectiveLevel())


def _route_path(scope: Scope) -> str:
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


def _ready(config: Any) -> EngineReady:
    model, cache = config.model_config, config.cache_config
    return EngineReady(
        model_path=model.model,
        device=config.device_config.device_type,
        dtype=str(model.dtype),
        vocab_size=model.get_vocab_size(),
        max_model_len=model.max_model_len,
        block_size=cache.block_size,
        num_blocks=cache.num_gpu_blocks or 0,
        eos_token_ids=[],
    )
