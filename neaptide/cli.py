"""The command line: one command, its subcommands. A composition root, like ``neaptide/launch``.

A subcommand is imported when it is asked for: all of them take a second, which a server that starts need not wait.
"""

import argparse
import difflib
import os
import re
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, TypeAlias

from neaptide import __version__
from neaptide.engine import extensions
from neaptide.engine.extensions import ExtensionError, known_names
from neaptide.server.client_variables import client_base_url
from neaptide.server.settings import OPTIONS, Option, default_text, split_list, type_of

UNHEARD = 141
"""The one that they give to a command whose output nobody reads any more, as before ``head``."""
MISUSED = 2
"""The exit status of a command that makes no sense."""


Subparsers: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def build_parser(only: str | None = None) -> argparse.ArgumentParser:
    """The parser of one subcommand, or of all, those of other packages included, if it names none."""
    parser = argparse.ArgumentParser(
        prog="neaptide", description="Real-time chat and batch files served from the same accelerator."
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
        help="serve a model",
        description="Serves a model on the OpenAI API. Every flag can also be NEAPTIDE_<NAME> or a key of a TOML file.",
    )
    _add_options(serve)
    serve.set_defaults(func=_serve)


def _add_cluster_parser(subparsers: Subparsers) -> None:
    cluster = subparsers.add_parser(
        "cluster",
        help="serve a model by several servers on this machine, behind one address",
        description="Serves a model by several servers that share their files and batches, behind one address. Takes "
        "the settings of serve; --store must name a PostgreSQL database, and --blobs is by default a directory in the "
        "data directory, where each server has one of its own.",
    )
    replicas_help = "How many servers (2); MIN:MAX: as many as online load and the deadlines of batches ask for."
    cluster.add_argument("--replicas", type=_sizes, default=(2, 2), metavar="N", help=replicas_help)
    _add_options(cluster)
    cluster.set_defaults(func=_cluster)


def _sizes(text: str) -> tuple[int, int]:
    """The fewest and the most."""
    found = re.fullmatch(r"(\d{1,4})(?::(\d{1,4}))?", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"a number, or MIN:MAX, not {text!r}")
    least, most = int(found[1]), int(found[2] or found[1])
    if not 1 <= least <= most:
        raise argparse.ArgumentTypeError("at least 1, and no fewer at most than at least")
    return least, most


def _add_options(parser: argparse.ArgumentParser) -> None:
    for name, option in OPTIONS.items():
        _add_option(parser, name, option)
    parser.add_argument(
        "--config", metavar="FILE.toml", help="Settings file; flags and environment variables win over it."
    )


def _add_option(serve: argparse.ArgumentParser, name: str, option: Option) -> None:
    """The model is the only argument without a flag's name. A flag that is not given leaves None."""
    default = default_text(name)
    flag = "--" + name.replace("_", "-")
    said = option.help.replace("%", "%%") + (f" ({default})" if default else "")
    if name == "model":
        serve.add_argument("model", nargs="?", metavar=option.metavar, help=said)
        return
    if type_of(name) is bool:
        serve.add_argument(flag, action="store_true", default=None, help=said)
        return
    serve.add_argument(
        flag,
        action="append" if option.is_repeated else "store",
        type=_flag_type(name, option),
        metavar=option.metavar,
        choices=option.choices or None,
        help=said,
    )


def _flag_type(name: str, option: Option) -> Callable[[str], Any]:
    kind = type_of(name)
    if kind is not tuple:
        return kind
    return str if option.is_repeated else split_list


def _serve(args: argparse.Namespace) -> int:
    from neaptide.launch.serve import LaunchError, serve
    from neaptide.server.settings import SettingsError
    from neaptide.server.settings_sources import load_settings

    flags = {name: value for name, value in vars(args).items() if name not in ("func", "config")}
    try:
        return serve(load_settings(flags, config_file=args.config))
    except (SettingsError, LaunchError) as error:
        print(f"neaptide serve: {error}", file=sys.stderr)
        return 1


def _cluster(args: argparse.Namespace) -> int:
    from neaptide.cluster.autoscaling import Scale
    from neaptide.cluster.launch.machine import serve_cluster
    from neaptide.launch.serve import LaunchError
    from neaptide.server.settings import SettingsError
    from neaptide.server.settings_sources import load_settings

    flags = {name: value for name, value in vars(args).items() if name not in ("func", "config", "replicas")}
    try:
        return serve_cluster(load_settings(flags, config_file=args.config), Scale(*args.replicas))
    except (SettingsError, LaunchError) as error:
        print(f"neaptide cluster: {error}", file=sys.stderr)
        return 1


def _from_commands(name: str, *values: Callable[[], str]) -> Callable[[Subparsers], None]:
    """``add_parser`` of a module in ``neaptide.commands``, which gets these values as well."""

    def add_parser(subparsers: Subparsers) -> None:
        import_module(f"neaptide.commands.{name}").add_parser(subparsers, *(value() for value in values))

    return add_parser


def _complaint(parser: argparse.ArgumentParser, words: Sequence[str], unknown: Sequence[str]) -> str:
    """About words that the command does not know; all of its flags would bury it."""
    for word in words:
        inner = _subcommands(parser).get(word)
        if inner is None:
            break
        parser = inner
    command = parser.prog
    flags = set(re.findall(r"--[a-z][a-z0-9-]*", parser.format_help()))
    complaint = f"{command}: unrecognized arguments: {' '.join(unknown)}"
    nearest = difflib.get_close_matches(unknown[0].partition("=")[0], flags, n=1)
    advice = f"did you mean {nearest[0]}? See" if nearest else "see"
    return f"{complaint}; {advice} {command} --help\n"


def _subcommands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    # argparse has no public way to ask
    groups = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    return {name: inner for group in groups for name, inner in group.choices.items()}


COMMANDS: dict[str, Callable[[Subparsers], None]] = {
    "serve": _add_serve_parser,
    "cluster": _add_cluster_parser,
    "demo": _from_commands("demo.command"),
    "batch": _from_commands("batch", client_base_url),
    "data": _from_commands("data"),
    "loadgen": _from_commands("loadgen.command", client_base_url),
    "calibrate": _from_commands("calibrate"),
    "simulate": _from_commands("simulate"),
    "plan": _from_commands("plan"),
    "offline-plan": _from_commands("offline.plan"),
}


def main(words: Sequence[str]) -> int:
    try:
        parser = build_parser(words[0] if words else None)
    except ExtensionError as error:
        print(f"neaptide: {error}", file=sys.stderr)
        return MISUSED
    args, unknown = parser.parse_known_args(words)
    if unknown:
        parser.exit(MISUSED, _complaint(parser, words, unknown))
    try:
        status: int = args.func(args)
        sys.stdout.flush()
    except BrokenPipeError:
        if args.func in (_serve, _cluster):
            raise
        # What is left of the output has no place to go when the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return UNHEARD
    return status
