"""A command whose output nobody reads any more ends quietly."""

import argparse
import os
import sys

import pytest

from neaptide import cli


@pytest.mark.parametrize("lines", [1, 10_000])
def test_a_closed_pipe_ends_a_command_quietly(
    lines: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """With as little output as fits into a buffer, which is flushed behind the command, and with more."""

    def say(args: argparse.Namespace) -> int:
        for line in range(lines):
            print(f"line {line}")
        return 0

    def add_parser(subparsers: cli.Subparsers) -> None:
        subparsers.add_parser("say").set_defaults(func=say)

    monkeypatch.setattr(cli, "COMMANDS", {"say": add_parser})
    read, write = os.pipe()
    os.close(read)
    with open(write, "w", encoding="utf-8") as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        assert cli.main(["say"]) == 141
    assert capfd.readouterr() == ("", "")
