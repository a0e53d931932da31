"""The command line: one command, its subcommands. A composition root, like ``neaptide/launch``.

A subcommand is imported when it is asked for: all of them take a second, which a server that starts need not wait.
"""

import argparse
import difflib
import os
import re
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, NoReturn, TypeAlias

from neaptide import __version__
from neaptide.commands.settings_flags import add_settings
from neaptide.engine import extensions
from neaptide.engine.extensions import ExtensionError, known_names
from neaptide.extras import EXTRA_OF, MissingPartError, missing_part
from neaptide.server.client_variables import client_base_url

if TYPE_CHECKING:
    from neaptide.cluster.gateway.addresses import Addresses, LookUp

UNHEARD = 141
"""The one that they give to a command whose output nobody reads any more, as before ``head``."""
MISUSED = 2
"""The exit status of a command that makes no sense."""


Subparsers: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


class Parser(argparse.ArgumentParser):
    """Parser that complains in one line, without the usage of all flags. Its subparsers do the same."""

    def error(self, message: str) -> NoReturn:
        self.exit(MISUSED, f"{self.prog}: {message}; see {self.prog} --help\n")


def build_parser(only: str | None = None) -> argparse.ArgumentParser:
    """The parser of one subcommand, or of all, those of other packages included, if it names none."""
    parser: argparse.ArgumentParser = Parser(
        prog="neaptide", description="Live chat and batch jobs on the same GPU or CPU."
    )
    parser.add_argument("--version", action="version", version=f"neaptide {__version__}")
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND")
    if only in COMMANDS:
        COMMANDS[only](subparsers)
        return parser
    others = [name for name in known_names(extensions.COMMANDS, ()) if name not in COMMANDS]
    if only in others:
        extensions.load(extensions.COMMANDS, "command", only)(subparsers)
        return parser
    for add_parser in COMMANDS.values():
        add_parser(subparsers)
    for name in others:
        _add_from_elsewhere(name, subparsers)
    return parser


def _add_from_elsewhere(name: str, subparsers: Subparsers) -> None:
    """One that cannot be loaded takes none of the others away."""
    try:
        extensions.load(extensions.COMMANDS, "command", name)(subparsers)
    except ExtensionError as error:
        print(f"neaptide: {error}", file=sys.stderr)


def _add_serve_parser(subparsers: Subparsers) -> None:
    serve = subparsers.add_parser(
        "serve",
        add_help=False,
        help="serve a model",
        description="Serves a model on the OpenAI API. Every flag can also be NEAPTIDE_<NAME> or a key of a TOML file.",
    )
    add_settings(serve)
    serve.set_defaults(func=_serve)


def _add_cluster_parser(subparsers: Subparsers) -> None:
    cluster = subparsers.add_parser(
        "cluster",
        add_help=False,
        help="run several servers on this machine, behind one address",
        description="Runs several servers behind one address. They share files and batches. Takes the settings of "
        "serve. --store must name a PostgreSQL database. --blobs is by default a directory in the data directory.",
    )
    replicas_help = "Number of servers (2), or MIN:MAX to follow online load and batch deadlines."
    cluster.add_argument("--replicas", type=_sizes, default=(2, 2), metavar="N", help=replicas_help)
    add_settings(cluster)
    cluster.set_defaults(func=_cluster)


OF_A_GATEWAY = frozenset(
    (
        "model",
        "served_model_name",
        "tool_call_parser",
        "reasoning_parser",
        "host",
        "port",
        "api_key",
        "allowed_hosts",
        "cors_origins",
        "max_connections",
        "drain_timeout_s",
        "drain_min_s",
        "header_timeout_s",
        "body_timeout_s",
        "send_timeout_s",
        "log_level",
        "log_format",
    )
)
"""Settings that a gateway alone uses."""


def _add_gateway_parser(subparsers: Subparsers) -> None:
    gateway = subparsers.add_parser(
        "gateway",
        add_help=False,
        help="one address for servers that run elsewhere",
        description="Routes requests to servers that run elsewhere, by their slack and cached prefixes. Reads the "
        "model's tokenizer, not its weights. Give it the keys and the model that the servers have.",
    )
    where = gateway.add_mutually_exclusive_group(required=True)
    where.add_argument("--servers", type=_servers, metavar="URL,URL", help="Addresses of the servers.")
    dns_help = "Name of the servers, such as a headless Service; all its addresses are looked up every 2 s."
    where.add_argument("--servers-dns", type=_servers_dns, metavar="NAME:PORT", help=dns_help)
    add_settings(gateway, only=OF_A_GATEWAY)
    gateway.set_defaults(func=_gateway)


def _servers(text: str) -> "LookUp":
    from neaptide.cluster.gateway.addresses import listed

    try:
        found = listed(text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None

    async def find() -> "Addresses":
        return found

    return find


def _servers_dns(text: str) -> "LookUp":
    from neaptide.cluster.gateway.addresses import look_up, name_and_port

    try:
        return partial(look_up, *name_and_port(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _sizes(text: str) -> tuple[int, int]:
    """The fewest and the most."""
    found = re.fullmatch(r"(\d{1,4})(?::(\d{1,4}))?", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"a number, or MIN:MAX, not {text!r}")
    least, most = int(found[1]), int(found[2] or found[1])
    if not 1 <= least <= most:
        raise argparse.ArgumentTypeError("MIN must be at least 1, and MAX at least MIN")
    return least, most


def _serve(args: argparse.Namespace) -> int:
    from neaptide.launch.serve import LaunchError, WrongValueError, serve
    from neaptide.server.settings import SettingsError
    from neaptide.server.settings_sources import load_settings

    flags = {name: value for name, value in vars(args).items() if name not in ("func", "config")}
    try:
        return serve(load_settings(flags, config_file=args.config))
    except (SettingsError, LaunchError) as error:
        print(f"neaptide serve: {error}", file=sys.stderr)
        return MISUSED if isinstance(error, SettingsError | WrongValueError) else 1


def _cluster(args: argparse.Namespace) -> int:
    from neaptide.cluster.autoscaling import Scale
    from neaptide.cluster.launch.machine import serve_cluster
    from neaptide.launch.serve import LaunchError, WrongValueError
    from neaptide.server.settings import SettingsError
    from neaptide.server.settings_sources import load_settings

    flags = {name: value for name, value in vars(args).items() if name not in ("func", "config", "replicas")}
    try:
        return serve_cluster(load_settings(flags, config_file=args.config), Scale(*args.replicas))
    except (SettingsError, LaunchError) as error:
        print(f"neaptide cluster: {error}", file=sys.stderr)
        return MISUSED if isinstance(error, SettingsError | WrongValueError) else 1


def _gateway(args: argparse.Namespace) -> int:
    from neaptide.cluster.launch.fronting import serve_gateway
    from neaptide.launch.serve import LaunchError, WrongValueError
    from neaptide.server.settings import SettingsError
    from neaptide.server.settings_sources import load_settings

    flags = {name: value for name, value in vars(args).items() if name in OF_A_GATEWAY}
    try:
        return serve_gateway(load_settings(flags, config_file=args.config), args.servers or args.servers_dns)
    except (SettingsError, LaunchError) as error:
        print(f"neaptide gateway: {error}", file=sys.stderr)
        return MISUSED if isinstance(error, SettingsError | WrongValueError) else 1


def _from_commands(name: str, *values: Callable[[], str]) -> Callable[[Subparsers], None]:
    """``add_parser`` of a module in ``neaptide.commands``, which gets these values as well."""

    def add_parser(subparsers: Subparsers) -> None:
        import_module(f"neaptide.commands.{name}").add_parser(subparsers, *(value() for value in values))

    return add_parser


_FLAGS_OF_VLLM = {
    "--model": "the model is the first argument, without a flag",
    "--gpu-memory-utilization": "--kv-cache-gib sets the memory of the KV cache",
    "--tensor-parallel-size": "--executor vllm --executor-arg tensor_parallel_size=N uses several GPUs",
    "--chat-template": "put the template into the model's directory, as chat_template.jinja",
    "--trust-remote-code": "code of a model is never run",
}
"""What to do instead of flags that users of vLLM know."""


def _complaint(parser: argparse.ArgumentParser, words: Sequence[str], unknown: Sequence[str]) -> str:
    """About words that the command does not know; all of its flags would bury it."""
    for word in words:
        inner = _subcommands(parser).get(word)
        if inner is None:
            break
        parser = inner
    command = parser.prog
    flags = [flag for action in parser._actions for flag in action.option_strings]
    complaint = f"{command}: unrecognized arguments: {' '.join(unknown)}"
    nearest = difflib.get_close_matches(unknown[0].partition("=")[0], flags, n=1)
    advice = f"did you mean {nearest[0]}? See" if nearest else "see"
    if (flag := unknown[0].partition("=")[0]) in _FLAGS_OF_VLLM and command.endswith(" serve"):
        return f"{complaint}; {_FLAGS_OF_VLLM[flag]}\n"
    return f"{complaint}; {advice} {command} --help\n"


def _subcommands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    # argparse has no public way to ask
    groups = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    return {name: inner for group in groups for name, inner in group.choices.items()}


def _advice(error: MissingPartError | ModuleNotFoundError) -> MissingPartError:
    """What to install. A module that no extra brings is raised again: that it is missing is a fault of ours."""
    if isinstance(error, MissingPartError):
        return error
    package = (error.name or "").partition(".")[0]
    if package not in EXTRA_OF:
        raise error
    return missing_part(package)


COMMANDS: dict[str, Callable[[Subparsers], None]] = {
    "serve": _add_serve_parser,
    "cluster": _add_cluster_parser,
    "gateway": _add_gateway_parser,
    "demo": _from_commands("demo.command"),
    "batch": _from_commands("batch", client_base_url),
    "why": _from_commands("why", client_base_url),
    "data": _from_commands("data"),
    "loadgen": _from_commands("loadgen.command", client_base_url),
    "calibrate": _from_commands("calibrate"),
    "simulate": _from_commands("simulate"),
    "plan": _from_commands("plan"),
    "observe": _from_commands("observe"),
    "offline-plan": _from_commands("offline.plan"),
}


def main(words: Sequence[str]) -> int:
    try:
        parser = build_parser(words[0] if words else None)
    except ExtensionError as error:
        print(f"neaptide: {error}", file=sys.stderr)
        return MISUSED
    if not words:
        parser.print_help()
        return 0
    args, unknown = parser.parse_known_args(words)
    if unknown:
        parser.exit(MISUSED, _complaint(parser, words, unknown))
    try:
        status: int = args.func(args)
        sys.stdout.flush()
    except (MissingPartError, ModuleNotFoundError) as error:
        print(f"neaptide {words[0]}: {_advice(error)}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        if args.func in (_serve, _cluster, _gateway):
            raise
        # What is left of the output has no place to go when the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return UNHEARD
    return status
