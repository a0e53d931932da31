"""The ASGI application, assembled from its parts; it holds no state of its own."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from fastapi import APIRouter, FastAPI
from fastapi.exceptions import RequestValidationError
from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector

import neaptide
from neaptide.engine.messages import EngineReady, Occupancy, StepStats
from neaptide.server.batches.metrics import BatchMetrics
from neaptide.server.batches.service import BatchService
from neaptide.server.context import ServingContext
from neaptide.server.counterfactual.service import Shadow
from neaptide.server.engine_client.capacity_queries import CapacityQueries
from neaptide.server.engine_client.engine_state import EngineState
from neaptide.server.engine_client.events import EngineLost, RequestFailed
from neaptide.server.http.auth import KeyRing
from neaptide.server.http.error_replies import install_handlers
from neaptide.server.http.hosts import HostFilter
from neaptide.server.http.layers import add_layers
from neaptide.server.limits.counts import Counts, OwnCounts
from neaptide.server.limits.limiter import RateLimiter
from neaptide.server.observe.facts import facts_of
from neaptide.server.observe.metrics import ServerMetrics
from neaptide.server.observe.metrics_engine import EngineMetrics
from neaptide.server.observe.metrics_info import InfoMetrics
from neaptide.server.observe.metrics_keys import CostMetrics, KeyMetrics
from neaptide.server.observe.metrics_vllm import VllmMetrics
from neaptide.server.openai.openapi import install_openapi
from neaptide.server.routes import (
    admin,
    chat,
    completions,
    dashboard,
    docs,
    figures,
    health,
    models,
    responses,
    tokenize,
    why,
)
from neaptide.server.why.desk import WhyDesk

__all__ = ["ServerState", "ServingContext", "create_app"]


@dataclass(slots=True, kw_only=True)
class ServerState:
    """Parts that ``launch`` gives to the app."""

    context: ServingContext
    keys: KeyRing = field(default_factory=lambda: KeyRing(()))
    registry: CollectorRegistry = field(default_factory=CollectorRegistry)
    metrics_compat: str = "vllm"
    """``vllm`` also emits the series that stock vLLM dashboards read; ``none`` does not."""
    hosts: HostFilter | None = None
    """Accepted ``Host`` headers; None accepts all."""
    cors_origins: Sequence[str] = ()
    """Sites whose pages may call this server from a browser; ``*`` is any."""
    batches: BatchService | None = None
    """The batch service, for the routers that serve it."""
    counts: Counts | None = None
    """Counts of what keys use; None keeps them in memory only."""
    shadow: Shadow | None = None
    """Counterfactual replay of the recorded traffic; None records none."""
    profiles: Sequence[str] = ()
    """Names of the device profiles that a what-if question may name."""


def create_app(state: ServerState, *, extra_routers: Sequence[APIRouter] = ()) -> FastAPI:
    """The app for one model. ``launch`` starts and stops the services that it uses.

    Routes find ``context``, ``metrics``, ``keys``, ``limiter`` and ``batches`` in ``request.app.state``.
    """
    metrics = ServerMetrics(state.registry, state.context.wall_clock)
    state.context.client.subscribe(StepStats, metrics.on_stats)
    state.context.client.subscribe(RequestFailed, metrics.on_request_failed)
    state.context.client.subscribe(Occupancy, metrics.history.on_occupancy)
    state.context.client.subscribe(EngineLost, metrics.history.on_engine_lost)
    state.context.client.subscribe(EngineReady, metrics.history.on_engine_ready)
    engine = EngineState(state.context.client, state.context.clock)
    metrics.own_wait.set_function(lambda: state.context.waits.forecast_s)
    state.context.waits.on_refused = partial(metrics.on_refused_unread, state.context.model_id)
    EngineMetrics(state.registry, engine)
    InfoMetrics(state.registry, lambda: facts_of(state.context))
    if state.metrics_compat == "vllm":
        compat = VllmMetrics(state.registry, state.context.model_id, state.context.client, engine)
        metrics.add_sink(compat)
        metrics.http.listeners.append(compat.on_http)
        state.context.client.subscribe(StepStats, compat.on_stats)
    totals: BatchMetrics | None = None
    if state.batches is not None:
        batches = state.batches
        totals = BatchMetrics(state.registry, batches.store, state.context.wall_clock, batches.outlooks, batches.leases)
        metrics.add_source(totals)
    for collector in (ProcessCollector, PlatformCollector, GCCollector):
        collector(registry=state.registry)

    app = FastAPI(
        title="Neaptide",
        version=neaptide.__version__,
        redirect_slashes=False,
        docs_url=None,  # FastAPI's own pages load scripts from other servers; ours is a route.
        redoc_url=None,
    )
    app.state.context = state.context
    app.state.metrics = metrics
    app.state.engine = engine
    app.state.batch_totals = totals
    app.state.profiles = state.profiles
    app.state.overview = dashboard.DashboardData(app.state)
    app.state.keys = state.keys
    app.state.batches = state.batches
    counts = state.counts or OwnCounts(lambda: state.context.clock(), lambda: state.context.wall_clock())
    app.state.limiter = RateLimiter(counts, KeyMetrics(state.registry))
    app.state.shadow = state.shadow
    app.state.why = why_desk = WhyDesk(
        state.context.client, lambda: state.context.clock(), lambda: state.context.wall_clock()
    )
    metrics.add_end_sink(why_desk.requests)
    if state.batches is not None:
        state.batches.costs.uses = why_desk.device
        state.batches.costs.label_of = state.keys.label_of
        CostMetrics(state.registry, state.batches.costs)
    app.state.capacity_queries = CapacityQueries(state.context.client, lambda: state.context.clock())
    install_handlers(app, RequestValidationError)
    install_openapi(app)
    add_layers(app, state.keys, metrics.http, state.context.clock, state.hosts, state.cors_origins)
    own = (chat, completions, responses, models, tokenize, health, figures, admin, why, docs, dashboard)
    for router in (*(module.router for module in own), *extra_routers):
        app.include_router(router)
    return app
