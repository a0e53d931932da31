"""The command line: one command, its subcommands. A composition root, like ``server/launch.py``."""

import argparse
import sys
from collections.abc import Sequence

from neaptide import __version__
from neaptide.commands import batch, calibrate, data, demo, experiment, simulate
from neaptide.server.settings import client_base_url

INTERRUPTED = 130
"""The exit status that shells give to a command ended by Ctrl-C."""


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="neaptide", description="Real-time chat and batch files served from the same accelerator."
    )
    parser.add_argument("--version", action="version", version=f"neaptide {__version__}")
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_serve_parser(subparsers)
    demo.add_parser(subparsers)
    batch.add_parser(subparsers, client_base_url())
    data.add_parser(subparsers)
    calibrate.add_parser(subparsers)
    experiment.add_parser(subparsers)
    simulate.add_parser(subparsers)
    return parser


def _add_serve_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    serve = subparsers.add_parser(
        "serve",
        help="serve a model",
        description="Serves a model on the OpenAI API. Every flag can also be NEAPTIDE_<NAME> or a key of a TOML file.",
    )
    add = serve.add_argument
    add("model", nargs="?", metavar="MODEL", help="directory, hub id, or the embedded neaptide-tiny (default)")
    add("--served-model-name", metavar="ID", help="model id on the API")
    add("--host", help="address to listen on (127.0.0.1)")
    add("--port", type=int, help="port to listen on (8000)")
    add("--data-dir", metavar="DIR", help="files, batches and results (~/.local/share/neaptide)")
    add("--device", choices=("auto", "cpu", "cuda"))
    add("--dtype", choices=("auto", "float32", "bfloat16", "float16"))
    add("--profile", metavar="NAME|FILE", help="device profile (an earlier start's, or measured)")
    add("--policy", metavar="NAME", help="scheduling policy (neaptide); the others are baselines")
    add("--ttft-slo-ms", type=float, metavar="N", help="default target for the first token (1000)")
    add("--tpot-slo-ms", type=float, metavar="N", help="default target per further token (50 on cuda, 100 on cpu)")
    add("--api-key", action="append", metavar="KEY[:TIER]", help="accept this key; repeat for several")
    add("--allowed-hosts", type=_comma_separated, metavar="NAME,...", help="names in the Host header beside loopback")
    add("--completion-windows", type=_comma_separated, metavar="24h,...", help="accepted completion windows (24h)")
    add("--offline-max-kv-ratio", type=float, metavar="X", help="share of the KV cache that batch work may hold (0.9)")
    add("--metrics-compat", choices=("vllm", "none"), help="also export vLLM's metric names (vllm)")
    add("--max-model-len", type=int, metavar="TOKENS", help="prompt and output of one request at most")
    add("--max-num-seqs", type=int, metavar="N", help="requests that run at once (256)")
    add("--max-num-batched-tokens", type=int, metavar="TOKENS", help="tokens computed in one step at most (2048)")
    add("--kv-cache-gib", type=float, metavar="GIB", help="memory for the KV cache (CPU: 1)")
    add("--num-threads", type=int, metavar="N", help="compute threads on a CPU (0: all cores but one)")
    add("--max-connections", type=int, metavar="N", help="open client connections (4096)")
    add("--max-online-requests", type=int, metavar="N", help="online requests at work or waiting (4096)")
    add("--max-offline-requests", type=int, metavar="N", help="flex requests at work or waiting (4096)")
    add("--log-level", choices=("debug", "info", "warning", "error"))
    add("--log-format", choices=("json", "text"))
    add("--config", metavar="FILE.toml", help="read settings from a file; flags and environment win over it")
    serve.set_defaults(func=_serve)


def _comma_separated(text: str) -> tuple[str, ...]:
    return tuple(part for part in text.split(",") if part)


def _serve(args: argparse.Namespace) -> int:
    from neaptide.launch.serve import LaunchError, serve
    from neaptide.server.settings import SettingsError, load_settings

    flags = {name: value for name, value in vars(args).items() if name not in ("func", "config")}
    try:
        return serve(load_settings(flags, config_file=args.config))
    except (SettingsError, LaunchError) as error:
        print(f"neaptide serve: {error}", file=sys.stderr)
        return 1


def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    try:
        status: int = args.func(args)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return INTERRUPTED
    return status
