"""``python -m neaptide_lab COMMAND``: the laboratory's commands, where its entry points are not installed."""

import argparse
import sys

from neaptide_lab import command
from neaptide_lab.experiments.judgement import command as judgement
from neaptide_lab.gym import command as gym


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m neaptide_lab", description=__doc__)
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND")
    for add_parser in (command.add_parser, judgement.add_parser, gym.add_parser):
        add_parser(subparsers)
    args = parser.parse_args()
    status: int = args.func(args)
    return status


if __name__ == "__main__":
    sys.exit(main())
