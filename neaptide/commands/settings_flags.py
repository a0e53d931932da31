"""Flags of ``serve`` and ``cluster``: one for each setting, in groups, with a short and a long help."""

import argparse
from collections.abc import Callable, Collection, Sequence
from typing import Any

from neaptide.server.settings import (
    EXPERT,
    GROUPS,
    OPTIONS,
    TOKENS,
    Option,
    default_text,
    split_list,
    token_count,
    type_of,
)


def add_settings(parser: argparse.ArgumentParser, only: Collection[str] = OPTIONS) -> None:
    """Adds a flag for every setting, or for some, ``--config`` and both kinds of help to a parser that has no help of
    its own.

    ``--help`` shows the first sentence of each setting and leaves out the experts' group; ``--help-all`` shows all.
    """
    parser.usage = "%(prog)s [MODEL] [FLAGS]"
    parser.epilog = f"{parser.prog} --help-all: every flag, with the full texts."
    parser.add_argument("-h", "--help", action="help", help="show this short help")
    parser.add_argument("--help-all", action=_HelpAll, help="show every flag, with the full texts")
    parser.add_argument(
        "--config", metavar="FILE.toml", help="Settings file. Flags and environment variables override it."
    )
    for name, names in GROUPS.items():
        wanted = [setting for setting in names if setting in only]
        if not wanted:
            continue
        group = parser.add_argument_group(name)
        for setting in wanted:
            _add_flag(group, setting, OPTIONS[setting], is_shown=name != EXPERT)


class _HelpAll(argparse.Action):
    """Prints the help with the full text of every setting."""

    def __init__(self, option_strings: Sequence[str], dest: str, **kwargs: Any) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, default=argparse.SUPPRESS, **kwargs)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        for action in parser._actions:  # argparse has no public way to ask
            if action.dest in OPTIONS:
                action.help = _help_text(action.dest, OPTIONS[action.dest].help)
        parser.epilog = None
        parser.print_help()
        parser.exit()


def _add_flag(group: "argparse._ArgumentGroup", name: str, option: Option, is_shown: bool) -> None:
    """``model`` is the only argument without a flag's name. A flag that is not given leaves None."""
    flag = "--" + name.replace("_", "-")
    said = _help_text(name, option.help.partition(". ")[0].removesuffix(".")) if is_shown else argparse.SUPPRESS
    if name == "model":
        group.add_argument("model", nargs="?", metavar=option.metavar, help=said)
        return
    if type_of(name) is bool:
        group.add_argument(flag, action="store_true", default=None, help=said)
        return
    group.add_argument(
        flag,
        action="append" if option.is_repeated else "store",
        type=_flag_type(name, option),
        metavar=option.metavar,
        choices=option.choices or None,
        help=said,
    )


def _help_text(name: str, text: str) -> str:
    default = default_text(name)
    return text.replace("%", "%%") + (f" ({default})" if default else "")


def _flag_type(name: str, option: Option) -> Callable[[str], Any]:
    kind = type_of(name)
    if option.metavar == TOKENS:
        return _tokens
    if kind is not tuple:
        return kind
    return str if option.is_repeated else split_list


def _tokens(text: str) -> int:
    try:
        return token_count(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of tokens") from None
