"""Composition root of what stands before the replicas: the same for one machine and on Ray."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import httpx
from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector
from starlette.applications import Starlette

from neaptide.cluster.gateway.app import GatewayState, create_gateway
from neaptide.cluster.gateway.prompts import PromptReader
from neaptide.cluster.gateway.replicas import Replicas
from neaptide.cluster.routing import SlackRouter
from neaptide.engine.kv.prefix_index import extend_block_hashes
from neaptide.launch.serve import LaunchError, model_context
from neaptide.server.context import ServingContext
from neaptide.server.edge.auth import KeyRing, split_marks
from neaptide.server.edge.hosts import HostFilter
from neaptide.server.observe.metrics_http import OF_A_GATEWAY, HttpMetrics
from neaptide.server.settings import Settings
from neaptide.server.settings_sources import data_path

CONNECT_S = 5.0
"""To a replica; none that listens takes so long. What waits for a machine that is gone goes to another one then."""
KEEP_ALIVE_S = 30.0
"""Of a connection to a replica that rests: less than replicas keep it, so that none is used as it is closed."""


@dataclass(slots=True)
class Gateway:
    """``close`` it in the end."""

    app: Starlette
    context: ServingContext
    replicas: Replicas
    metrics: HttpMetrics
    clients: Sequence[httpx.AsyncClient]

    async def close(self) -> None:
        await self.replicas.close()
        for client in self.clients:
            await client.aclose()
        self.context.grammars.close()


def check_shared(settings: Settings) -> None:
    """Raises LaunchError where replicas would not share their batches."""
    if settings.store is None:
        raise LaunchError("replicas share their batches in a database: give --store postgresql://USER@HOST/DATABASE")


def question_headers(settings: Settings) -> dict[str, str]:
    """Of questions for replicas: a key, where they want one."""
    return {"authorization": f"Bearer {split_marks(settings.api_key[0])[0]}"} if settings.api_key else {}


def build_gateway(settings: Settings) -> Gateway:
    """Without replicas so far. On the event loop that it will run on.

    Raises:
        SettingsError, LaunchError: the model or the data directory cannot be used, or the keys make no sense.
    """
    context, _ = model_context(settings, data_path(settings.data_dir))
    try:
        keys = KeyRing(settings.api_key)
    except ValueError as error:
        raise LaunchError(str(error)) from error
    # It would write down every question, and the targets of all requests.
    logging.getLogger("httpx").setLevel(logging.WARNING)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=KEEP_ALIVE_S)
    # What the environment says of proxies is not about neighbours.
    http = httpx.AsyncClient(timeout=httpx.Timeout(None, connect=CONNECT_S), limits=limits, trust_env=False)
    questions = httpx.AsyncClient(limits=limits, trust_env=False)
    replicas = Replicas(questions, SlackRouter(), question_headers(settings))
    registry = CollectorRegistry()
    for collector in (ProcessCollector, PlatformCollector, GCCollector):
        collector(registry=registry)
    state = GatewayState(
        context=context,
        keys=keys,
        hosts=HostFilter.of_settings(settings.allowed_hosts, bound_to=settings.host, keys_required=keys.required),
        cors_origins=settings.cors_origins,
        replicas=replicas,
        reader=PromptReader(context, keys, block_hashes),
        http=http,
        registry=registry,
    )
    metrics = HttpMetrics(registry, OF_A_GATEWAY)
    return Gateway(create_gateway(state, metrics), context, replicas, metrics, (http, questions))


def block_hashes(token_ids: Sequence[int], block_size: int, salt: bytes) -> list[bytes]:
    """As engines name the full blocks of a prompt."""
    hashes: list[bytes] = []
    extend_block_hashes(hashes, token_ids, block_size, salt)
    return hashes
