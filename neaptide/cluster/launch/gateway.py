"""Composition root of the gateway, for one machine and for Ray."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector
from starlette.applications import Starlette

from neaptide.cluster.gateway.app import GatewayState, create_gateway
from neaptide.cluster.gateway.key_auth import KeyAuth
from neaptide.cluster.gateway.prompts import PromptReader
from neaptide.cluster.gateway.replicas import Replicas
from neaptide.cluster.routing import SlackRouter
from neaptide.engine.kv.prefix_index import extend_block_hashes
from neaptide.launch.serve import WrongValueError, key_reloader, key_ring, model_context
from neaptide.server.context import ServingContext
from neaptide.server.http.hosts import HostFilter
from neaptide.server.limits.key_file import KeyReloader
from neaptide.server.observe.metrics_http import OF_A_GATEWAY, HttpMetrics
from neaptide.server.settings import Settings
from neaptide.server.settings_sources import data_path

CONNECT_S = 5.0
"""Timeout of connecting to a replica, for machines that are gone; a listening replica takes far less."""
KEEP_ALIVE_S = 30.0
"""How long an idle connection to a replica is kept. It is less than replicas keep it, so that none is used while it
closes."""


@dataclass(slots=True)
class RunningGateway:
    """The parts of a gateway; call ``close`` at the end."""

    app: Starlette
    context: ServingContext
    replicas: Replicas
    metrics: HttpMetrics
    registry: CollectorRegistry
    clients: Sequence[httpx.AsyncClient]
    reloader: KeyReloader | None
    """What follows the key file; None without one."""

    async def close(self) -> None:
        if self.reloader is not None:
            await self.reloader.stop()
        await self.replicas.close()
        for client in self.clients:
            await client.aclose()
        self.context.grammars.close()
        self.context.tokenizer.close()


def check_shared(settings: Settings) -> None:
    """Raises WrongValueError if replicas would not share their batches."""
    if settings.store is None:
        raise WrongValueError("replicas share their batches in a database: set --store postgresql://USER@HOST/DATABASE")


def build_gateway(settings: Settings, has_engines: bool = True) -> RunningGateway:
    """Builds a gateway without replicas, on the event loop that it will run on.

    Args:
        has_engines: replicas run on this machine, so their model must be there in full.

    Raises:
        SettingsError, LaunchError: the model or the data directory cannot be used, or the keys are invalid.
    """
    # Without an engine nothing is written.
    data_dir = data_path(settings.data_dir) if has_engines else Path()
    context, _ = model_context(settings, data_dir, has_engines)
    keys = key_ring(settings)
    # httpx would log every poll, and the URLs of all requests.
    logging.getLogger("httpx").setLevel(logging.WARNING)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=KEEP_ALIVE_S)
    # Proxies of the environment are not meant for replicas.
    http = httpx.AsyncClient(timeout=httpx.Timeout(None, connect=CONNECT_S), limits=limits, trust_env=False)
    questions = httpx.AsyncClient(limits=limits, trust_env=False, auth=KeyAuth(keys))
    replicas = Replicas(questions, SlackRouter())
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
    reloader = key_reloader(settings, keys)
    if reloader is not None:
        reloader.start()
    return RunningGateway(
        create_gateway(state, metrics), context, replicas, metrics, registry, (http, questions), reloader
    )


def block_hashes(token_ids: Sequence[int], block_size: int, salt: bytes) -> list[bytes]:
    """Hashes of the full blocks of a prompt, as engines compute them."""
    hashes: list[bytes] = []
    extend_block_hashes(hashes, token_ids, block_size, salt)
    return hashes
