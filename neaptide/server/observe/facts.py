"""Model, device, policy, version and targets of a server, for displays."""

import contextlib

import msgspec

import neaptide
from neaptide.server.context import ServingContext
from neaptide.server.engine_client.client import EngineUnavailableError


class ServerFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Device and dtype are empty until the first engine is ready."""

    model: str = ""
    version: str = neaptide.__version__
    policy: str = ""
    device: str = ""
    dtype: str = ""
    started_s: int = 0
    """Unix time."""
    ttft_slo_s: float = 0.0
    tpot_slo_s: float = 0.0


def facts_of(context: ServingContext) -> ServerFacts:
    device = dtype = ""
    with contextlib.suppress(EngineUnavailableError):
        device, dtype = context.client.info.device, context.client.info.dtype
    return ServerFacts(
        model=context.model_id,
        policy=context.policy,
        device=device,
        dtype=dtype,
        started_s=context.created,
        ttft_slo_s=context.ttft_slo_s,
        tpot_slo_s=context.tpot_slo_s,
    )
