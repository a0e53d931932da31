"""Composition root: builds the server, and the engine inside the engine process.

The supervisor starts an engine process with ``python -m neaptide.launch.serve ADDRESS CONFIG_JSON``. Imports are local
to the process that needs them: the API process never loads torch, the engine process no web framework.
"""

import asyncio
import errno
import faulthandler
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from neaptide.engine.clock import MonotonicClock
from neaptide.engine.config import CacheConfig, EngineConfig, ExecutorConfig, ProfileConfig, SchedulerConfig
from neaptide.engine.messages import EngineFatal
from neaptide.launch.collector import pass_over_start_up
from neaptide.launch.early_checks import check_files, check_parts
from neaptide.launch.sharing import sharing_of
from neaptide.launch.stopping import CUT_S, LAST_REPLIES_S, Drain, cut
from neaptide.launch.threads import default_num_threads
from neaptide.server.batches.storing.data_dir import KERNELS, PROFILES, REQUEST_LOG, TEMPORARY, StoreError
from neaptide.server.observe.logs import configure_logging, one_line, resolved
from neaptide.server.settings import EMBEDDED_MODEL, Settings
from neaptide.server.settings_sources import data_path
from neaptide.server.text.native_memory import keep_little

if TYPE_CHECKING:
    import uvicorn

    from neaptide.models.config import ModelFacts
    from neaptide.server.batches.service import BatchService
    from neaptide.server.context import ServingContext
    from neaptide.server.counterfactual.service import Shadow
    from neaptide.server.fronts.owner import Fronts, OwnerParts
    from neaptide.server.http.auth import KeyRing
    from neaptide.server.limits.key_file import KeyReloader
    from neaptide.server.observe.work_log import WorkLog
    from neaptide.server.quotes.desk import QuoteDesk

logger = logging.getLogger(__name__)

DEFAULT_TPOT_CUDA_MS = 50.0
DEFAULT_TPOT_CPU_MS = 100.0
BACKLOG = 2048
"""Connections that wait to be accepted; uvicorn's default."""


# ---- both sides ------------------------------------------------------------------------------------------


def embedded_model_path() -> Path:
    return Path(__file__).parents[1] / "data" / EMBEDDED_MODEL


# ---- API process -----------------------------------------------------------------------------------------


class LaunchError(Exception):
    """The server cannot start. The message is one line for the operator."""


class WrongValueError(LaunchError):
    """A setting names something that does not exist or cannot be used. Nothing was served."""


def engine_config(
    settings: Settings,
    model_path: Path,
    fingerprint: str,
    max_model_len: int,
    data_dir: Path,
    eos_token_ids: tuple[int, ...] | None = None,
) -> EngineConfig:
    """The engine process's configuration. Unset targets get the device's defaults.

    Raises:
        WrongValueError: policy, executor or profile do not exist, the API keys are invalid, or the step log cannot be
            written.
    """
    from neaptide.engine.scheduler.policies import check_name
    from neaptide.executors.registry import check_executor

    arguments = executor_arguments(settings.executor_arg)
    host_cache_bytes = int(settings.host_cache_gib * (1 << 30))
    try:
        check_files(settings)
        check_name(settings.policy)
        check_executor(settings.executor, arguments, host_cache_bytes, settings.batch_invariant, settings.quantization)
    except ValueError as error:
        raise WrongValueError(str(error)) from error
    share_weights = key_ring(settings).share_weights
    on_cuda = settings.device == "cuda"
    tpot_slo_ms = settings.tpot_slo_ms or (DEFAULT_TPOT_CUDA_MS if on_cuda else DEFAULT_TPOT_CPU_MS)
    kv_cache_bytes = None if settings.kv_cache_gib is None else int(settings.kv_cache_gib * (1 << 30))
    return EngineConfig(
        cache=CacheConfig(
            block_size=settings.block_size or 0, kv_cache_bytes=kv_cache_bytes, host_cache_bytes=host_cache_bytes
        ),
        scheduler=SchedulerConfig(
            policy=settings.policy,
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            max_model_len=max_model_len,
            ttft_slo_s=settings.ttft_slo_ms / 1e3,
            tpot_slo_s=tpot_slo_ms / 1e3,
            late_price_s=settings.late_price_s,
            offline_max_kv_ratio=settings.offline_max_kv_ratio,
            share_weights=share_weights,
            abortable_steps=settings.give_up_steps == "on",
        ),
        executor=msgspec.structs.replace(
            _executor_config(settings, model_path, arguments), eos_token_ids=eos_token_ids
        ),
        profile=ProfileConfig(name=settings.profile, kept_in=str(data_dir / PROFILES), model_fingerprint=fingerprint),
        request_log_path=str(data_dir / REQUEST_LOG),
        request_log_max_bytes=int(settings.request_log_max_mb * 1e6),
        request_log_old_files=settings.request_log_old_files,
        step_log_path=settings.step_log,
        step_log_max_bytes=int(settings.step_log_max_mb * 1e6),
        records_traffic=settings.shadow == "on",
        offline_plan=settings.offline_plan,
        log_level=settings.log_level,
        log_format=resolved(settings.log_format),
    )


def key_ring(settings: Settings) -> "KeyRing":
    """The API keys of the settings. Raises WrongValueError."""
    from neaptide.server.http.auth import KeyRing
    from neaptide.server.limits.key_file import accepted_keys

    ring = KeyRing()
    try:
        ring.accept(accepted_keys(settings.api_key, settings.api_key_file))
    except ValueError as error:
        raise WrongValueError(str(error)) from error
    return ring


def key_reloader(
    settings: Settings, ring: "KeyRing", on_weights: "Callable[[dict[str, float]], None] | None" = None
) -> "KeyReloader | None":
    """What keeps the ring as the key file says; None without one.

    Args:
        on_weights: told of changed weights.
    """
    from neaptide.server.limits.key_file import KeyReloader

    if settings.api_key_file is None:
        return None
    return KeyReloader(ring, settings.api_key, settings.api_key_file, on_weights)


def _executor_config(settings: Settings, model_path: Path, arguments: dict[str, str]) -> ExecutorConfig:
    return ExecutorConfig(
        kind=settings.executor,
        model_path=str(model_path),
        device=settings.device,
        dtype=settings.dtype,
        num_threads=settings.num_threads or default_num_threads(model_path),
        cpu_kernels=settings.cpu_kernels,
        gpu_kernels=settings.gpu_kernels,
        quantization=settings.quantization,
        batch_invariant=settings.batch_invariant,
        sim_step_s=settings.sim_step_ms / 1e3,
        arguments=arguments,
    )


def executor_arguments(given: Sequence[str]) -> dict[str, str]:
    """The values of ``--executor-arg NAME=VALUE`` by name; ``a-b`` becomes ``a_b``.

    Raises:
        WrongValueError: an argument has no value, or is given twice.
    """
    arguments: dict[str, str] = {}
    for text in given:
        name, sign, value = text.partition("=")
        head, dot, part = name.strip().removeprefix("--").partition(".")
        name = head.replace("-", "_") + dot + part
        if not sign or not name:
            raise WrongValueError(f"executor_arg = {text!r} is not of the form NAME=VALUE")
        if name in arguments:
            raise WrongValueError(f"executor_arg = {text!r}: {name} is given twice")
        arguments[name] = value
    return arguments


def serve(settings: Settings, listener: socket.socket | None = None) -> int:
    """Serves until a stop signal, on ``listener`` if given. Returns the exit status.

    Raises:
        SettingsError, LaunchError: the model, the port, the data directory or the engine cannot be used.
        MissingPartError: a package that the settings need is not installed.
    """
    if listener is not None and settings.api_processes > 1:
        raise WrongValueError("api_processes is for neaptide serve: servers of a cluster have one API process each")
    check_parts(settings)
    configure_logging(settings.log_level, settings.log_format)
    keep_little()
    data_dir = data_path(settings.data_dir)
    context, config = model_context(settings, data_dir)
    listener = listener or listen(settings.host, settings.port, is_shared=settings.api_processes > 1)
    try:
        return asyncio.run(_serve(settings, context, config, data_dir, listener))
    finally:
        listener.close()


async def _serve(
    settings: Settings, context: "ServingContext", config: EngineConfig, data_dir: Path, listener: socket.socket
) -> int:
    from neaptide.server.engine_client.interpreter import Interpreter
    from neaptide.server.engine_client.supervisor import EngineRefusedError, EngineStartError, Supervisor

    try:
        server, service, desk, shadow, work_log, parts, reloader = _http_server(settings, context, data_dir)
        await service.start()
        desk.start()
    except StoreError as error:
        raise LaunchError(str(error)) from error
    await parts.limiter.start()
    await _tell_hidden_batches(settings, service)
    interpreter = Interpreter(settings.engine_python)
    supervisor = Supervisor(context.client, config, interpreter, settings.engine_timeout_s)
    fronts, listeners = _fronts(settings, parts, listener, config)
    Drain(server, context, service, settings.drain_timeout_s, settings.drain_min_s, fronts).install(reloader)
    serving = asyncio.create_task(server.serve(sockets=listeners))
    if fronts is not None:
        fronts.start()
    starting = asyncio.create_task(supervisor.start())
    if reloader is not None:
        reloader.start()
    try:
        await asyncio.wait({serving, starting}, return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            ready = starting.result()
            pass_over_start_up()
            address = url_of(settings.host, listener.getsockname()[1])
            device = f"{ready.device}, {ready.dtype}, {ready.num_blocks} KV blocks of {ready.block_size} tokens"
            logger.info("serving %s on %s (%s)", context.model_id, address, device)
            work_log.start()
            if shadow is not None:
                shadow.start()
        await serving
        await cut(server.server_state.tasks)
    except EngineStartError as error:
        server.should_exit = True
        await serving
        kind = WrongValueError if isinstance(error, EngineRefusedError) else LaunchError
        raise kind(str(error)) from error
    finally:
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        if fronts is not None:
            await fronts.stop(LAST_REPLIES_S + CUT_S)
        await work_log.stop()
        if shadow is not None:
            await shadow.stop()
        if reloader is not None:
            await reloader.stop()
        await parts.limiter.stop()
        await desk.stop()
        await service.stop()
        context.grammars.close()
        context.tokenizer.close()
        await supervisor.stop()
    logger.info("neaptide has stopped")
    return 0


async def _tell_hidden_batches(settings: Settings, service: "BatchService") -> None:
    """Logs how many batches no caller of this server can see. Their lines run all the same."""
    from neaptide.server.batches.storing.batch_rows import count_of_others
    from neaptide.server.batches.storing.store import StoreUnavailableError
    from neaptide.server.http.auth import ANONYMOUS

    owners = [one.tenant for one in key_ring(settings).principals] or [ANONYMOUS.tenant]
    try:
        count = await service.store.read(count_of_others, owners)
    except StoreUnavailableError:
        return
    if count:
        logger.warning("batches that no caller sees: %d, made with another API key or without one", count)


def _http_server(
    settings: Settings, context: "ServingContext", data_dir: Path
) -> "tuple[uvicorn.Server, BatchService, QuoteDesk, Shadow | None, WorkLog, OwnerParts, KeyReloader | None]":
    from neaptide.durations import DAY_S
    from neaptide.estimator.device_profile import profile_names
    from neaptide.launch.connections import Server, uvicorn_config
    from neaptide.launch.device_time import device_time
    from neaptide.server.app import ServerState, create_app
    from neaptide.server.batches.checking.worker import CheckerPool, WorkerChecker
    from neaptide.server.batches.lines import ContextCompiler
    from neaptide.server.batches.planning.planner import Planner
    from neaptide.server.batches.service import BatchService
    from neaptide.server.batches.wiring import BatchSettings
    from neaptide.server.counterfactual.service import Shadow
    from neaptide.server.fronts.owner import OwnerParts
    from neaptide.server.http.forwarding import with_client_addresses
    from neaptide.server.http.hosts import HostFilter
    from neaptide.server.limits.counts import OwnCounts
    from neaptide.server.limits.leased_counts import LeasedCounts
    from neaptide.server.observe.work_log import WorkLog
    from neaptide.server.quotes.desk import QuoteDesk
    from neaptide.server.routes.batches import batches_router
    from neaptide.server.routes.figures import backlog_router
    from neaptide.server.routes.files import files_router

    keys = key_ring(settings)
    try:
        batch_settings = BatchSettings(
            data_dir=data_dir,
            sharing=sharing_of(settings),
            completion_windows=settings.completion_windows,
            file_life_s=int(settings.file_retention_days * DAY_S),
        )
    except (ValueError, StoreError) as error:
        raise WrongValueError(str(error)) from error
    for principal in keys.principals:
        logger.info("key %s is accepted, %s", principal.key_id, principal.shown)
    compiler = ContextCompiler(context)
    checker = CheckerPool(partial(WorkerChecker, compiler.recipe()), keys.share_weight)
    service = BatchService(batch_settings, context.client, compiler, checker, planner=Planner())
    own = OwnCounts(context.clock, context.wall_clock, None if settings.blobs else service.store)
    counts = LeasedCounts(service.store, context.clock, own) if settings.blobs else own
    hosts = HostFilter.of_settings(settings.allowed_hosts, bound_to=settings.host, keys_required=keys.required)
    state = ServerState(
        context=context,
        keys=keys,
        hosts=hosts,
        metrics_compat=settings.metrics_compat,
        cors_origins=settings.cors_origins,
        batches=service,
        counts=counts,
        profiles=profile_names(),
    )
    if settings.shadow == "on":
        temporary = data_dir / TEMPORARY
        state.shadow = Shadow(context.client, state.registry, context.clock, temporary=temporary)
    desk = QuoteDesk(
        service, context.client, context.bodies, device_time, context.wall_clock, lambda: keys.share_weights
    )
    routers = (files_router(service), batches_router(service, desk), backlog_router(service))
    app = create_app(state, extra_routers=routers)
    app.state.metrics.add_end_sink(desk)
    app.state.metrics.storage_failing.set_function(lambda: float(service.storage_failing))
    served = with_client_addresses(app) if settings.api_processes > 1 else app
    server = Server(uvicorn_config(settings, served, app.state.metrics.http, context.waits))
    parts = OwnerParts(context=context, metrics=app.state.metrics, limiter=app.state.limiter, keys=keys)
    work_log = WorkLog(app.state.metrics.history, app.state.engine)
    reloader = key_reloader(settings, keys, context.client.set_share_weights)
    return server, service, desk, state.shadow, work_log, parts, reloader


def _fronts(
    settings: Settings, parts: "OwnerParts", listener: socket.socket, config: EngineConfig
) -> "tuple[Fronts | None, list[socket.socket]]":
    """The further API processes, if there are any, and the sockets on which this one listens."""
    from neaptide.server.fronts.owner import SOCKET, Fronts
    from neaptide.server.subprocesses.private_directory import PrivateDirectory

    if settings.api_processes == 1:
        return None, [listener]
    own = PrivateDirectory()
    forwarded = socket.socket(socket.AF_UNIX)
    forwarded.bind(str(own.path / SOCKET))
    forwarded.listen(BACKLOG)
    given = msgspec.structs.replace(
        settings,
        port=listener.getsockname()[1],
        model=settings.model if settings.model == EMBEDDED_MODEL else config.executor.model_path,
        served_model_name=parts.context.model_id,
        # What they do not use: keys come over the link, and no secret belongs on a command line.
        api_key=(),
        api_key_file=None,
        store=None,
        blobs=None,
        profile=None,
        step_log=None,
    )
    settings_json = msgspec.json.encode(given).decode()
    return Fronts(settings.api_processes - 1, parts, settings_json, own), [listener, forwarded]


def listen(host: str, port: int, *, is_shared: bool = False) -> socket.socket:
    """Listens on the address before anything is stored or started, so that a port in use is reported at once.

    Two sockets may be bound to one port until one of them listens, so binding alone does not show a conflict.

    Args:
        is_shared: whether further processes will listen on the address (``listen_too``).

    Raises:
        LaunchError: the address is not available.
    """
    if is_shared:
        # Alone first: another server may share its port in the same way, and would get half of the connections.
        with listen(host, port) as alone:
            port = alone.getsockname()[1]
        try:
            return listen_too(host, port)
        except OSError as error:
            raise LaunchError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        advice = "; choose another with --port, 0 takes a free one" if error.errno == errno.EADDRINUSE else ""
        raise LaunchError(f"cannot listen on {host}:{port}: {error.strerror or error}{advice}") from error
    return listener


def listen_too(host: str, port: int) -> socket.socket:
    """Listens on an address that several processes of a server share; the kernel spreads new connections evenly.

    Raises:
        OSError: the address is not available.
    """
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def url_of(host: str, port: int) -> str:
    """The server's URL for clients on this machine; an address that stands for all of them is no URL's host."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def model_context(settings: Settings, data_dir: Path, has_engine: bool = True) -> "tuple[ServingContext, EngineConfig]":
    """The model's facts for the routes, and the engine's configuration.

    Args:
        has_engine: an engine on this machine will run the model; else its weights are neither needed nor checked.

    Raises:
        LaunchError: the model cannot be downloaded or read.
        WrongValueError: it does not exist or is not supported, or its engine cannot be configured this way.
    """
    import time

    from neaptide.executors.registry import EXECUTORS
    from neaptide.executors.simulated.scripted import is_scripted
    from neaptide.models.checkpoint import load_model_config, load_model_facts, resolve_model
    from neaptide.models.config import ModelFacts, ModelUnavailableError, UnsupportedModelError
    from neaptide.server.context import Admission, GenerationDefaults, ServingContext
    from neaptide.server.engine_client.client import EngineClient
    from neaptide.server.engine_client.fingerprint import model_fingerprint
    from neaptide.server.engine_client.interpreter import Interpreter, InterpreterError
    from neaptide.server.observe.start_report import start_report
    from neaptide.server.parsers.choose import check_names
    from neaptide.server.text.ends import EndTokens
    from neaptide.server.text.tokenizer import Tokenizer

    try:
        Interpreter(settings.engine_python).check()
    except InterpreterError as error:
        raise WrongValueError(str(error)) from error
    try:
        is_embedded = settings.model == EMBEDDED_MODEL
        model_path = embedded_model_path() if is_embedded else resolve_model(settings.model, with_weights=has_engine)
        kind = EXECUTORS.get(settings.executor)
        knows_families = not has_engine or (kind is not None and kind.knows_families)
        model: ModelFacts = load_model_facts(model_path) if knows_families else load_model_config(model_path)
        tokenizer = Tokenizer(model_path, isolates_templates=not is_embedded)
        defaults = GenerationDefaults.load(model_path)
        fingerprint = model_fingerprint(model_path)
        check_names(settings.tool_call_parser, settings.reasoning_parser)
    except (ModelUnavailableError, OSError) as error:
        raise LaunchError(one_line(str(error))) from error
    except (UnsupportedModelError, ValueError) as error:
        raise WrongValueError(one_line(str(error))) from error
    max_model_len = _max_model_len(settings, model)
    ends = EndTokens.of(model, tokenizer)
    config = engine_config(settings, model_path, fingerprint, max_model_len, data_dir, ends.ids)
    context = ServingContext(
        model_id=settings.served_model_name or settings.model.rstrip("/").rpartition("/")[2],
        tokenizer=tokenizer,
        client=EngineClient(),
        created=int(time.time()),
        max_model_len=max_model_len,
        vocab_size=model.vocab_size,
        fingerprint=fingerprint,
        eos_token_ids=ends.ids,
        generation_defaults=defaults,
        ttft_slo_s=config.scheduler.ttft_slo_s,
        tpot_slo_s=config.scheduler.tpot_slo_s,
        policy=config.scheduler.policy,
        keep_alive_s=settings.stream_keep_alive_s,
        admission=Admission(settings.max_online_requests, settings.max_offline_requests),
        # A scripted answer counts as one that a model wrote under the grammar of the request.
        follows_grammars=kind is not None and (kind.follows_grammars or is_scripted(settings.executor, model_path)),
        max_masked_ends=None if kind is None else kind.max_masked_ends,
        engine_python=settings.engine_python,
        tool_call_parser=settings.tool_call_parser,
        reasoning_parser=settings.reasoning_parser,
    )
    for line in start_report(context, model, ends, settings):
        logger.info("%s", line)
    if context.parsers.warning:
        logger.warning("%s", context.parsers.warning)
    return context, config


def _max_model_len(settings: Settings, model: "ModelFacts") -> int:
    """Most prompt and output tokens of a request; a setting above what the model's positions reach is cut."""
    max_model_len = min(settings.max_model_len or model.served_context_tokens, model.max_position_embeddings)
    if settings.max_model_len is not None and settings.max_model_len > max_model_len:
        logger.warning(
            "max_model_len = %d is above the %d tokens (prompt + output) that the model's positions reach; using these",
            settings.max_model_len,
            max_model_len,
        )
    return max_model_len


# ---- engine process --------------------------------------------------------------------------------------


def engine_main(address: str, config_json: str) -> int:
    """Runs the engine until it is stopped. If it cannot start, it sends the reason to the server."""
    from neaptide.engine.process.arrivals import OnlineArrivals
    from neaptide.engine.process.loop import EngineSocket, run_engine
    from neaptide.launch.engine import build_engine, traffic_recorder

    # Prints the stack on a crash in native code, and when the server asks because the engine is silent.
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    config = msgspec.json.decode(config_json, type=EngineConfig)
    configure_logging(config.log_level, config.log_format)
    if config.profile.kept_in is not None:
        keep_kernels(Path(config.profile.kept_in).parent)
    clock = MonotonicClock()
    link = EngineSocket(address)
    try:
        try:
            core, ready = build_engine(config, clock)
        except (OSError, ValueError, RuntimeError) as error:
            link.send(EngineFatal(str(error), isinstance(error, ValueError)))
            return 1
        try:
            traffic = traffic_recorder(core, ready) if config.records_traffic else None
            arrivals = None
            if core.scheduler.config.abortable_steps and config.arrivals_fd is not None:
                arrivals = OnlineArrivals(config.arrivals_fd)
            run_engine(core, ready, link, link, clock, traffic, arrivals)
        finally:
            core.close()
        return 0
    finally:
        link.close()


def keep_kernels(data_dir: Path) -> None:
    """Lets compiled kernels be kept in the data directory if the user has no home directory that can be written, as in
    many containers."""
    try:
        has_home = os.access(Path.home(), os.W_OK)
    except RuntimeError:
        has_home = False
    if not has_home:
        os.environ.setdefault("XDG_CACHE_HOME", str(data_dir / KERNELS))
        os.environ.setdefault("TRITON_CACHE_DIR", str(data_dir / KERNELS / "triton"))


if __name__ == "__mp_main__":
    # In a process that the engine's executor starts, which imports the engine's main module first.
    from neaptide.engine.process.parent import die_with_parent

    die_with_parent(os.getppid())

if __name__ == "__main__":
    sys.exit(engine_main(sys.argv[1], sys.argv[2]))
