"""What structured output costs: ``python -m lab.benchmarks.structured``.

``[masks] [--requests N] [--steps N] [--vocab N]``: masks beside a step of the 111M model with a vocabulary of 128k.
``cases FILE...``: how exactly schemas are held, how long they take to compile, and ``xgrammar`` beside it.
``neighbours [--kind hostile|plain|held] [--turn-s S] [--pairs N]``: what chats feel of hostile schemas and grammars
and what these leave behind; less than four minutes on a machine that does nothing else.
Tables, then one JSON line.
"""

import argparse
import asyncio
import json
from pathlib import Path

from benchmarks.common import print_table
from lab.benchmarks.structured.attack import KINDS
from lab.benchmarks.structured.cases import measure_cases
from lab.benchmarks.structured.masks import measure_masks
from lab.benchmarks.structured.neighbours import measure_neighbours


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=("masks", "cases", "neighbours"), default="masks")
    parser.add_argument("files", type=Path, nargs="*")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--vocab", type=int, default=128_000)
    parser.add_argument("--threads", type=int, default=1, help="of the model; the server leaves one core free")
    parser.add_argument("--kind", choices=tuple(KINDS), default="hostile", help="what the neighbours ask for")
    parser.add_argument("--turn-s", type=float, default=5.0)
    parser.add_argument("--pairs", type=int, default=16, help="of turns, alone and beside the attack")
    args = parser.parse_args()
    found: dict[str, dict[str, float]] = {}
    if args.what == "cases":
        for path in args.files:
            found |= {f"{path.name}, {name}": values for name, values in measure_cases(path).items()}
    elif args.what == "neighbours":
        found["neighbours"] = asyncio.run(measure_neighbours(args.kind, args.turn_s, args.pairs))
    else:
        found["masks"] = measure_masks(args)
    for title, values in found.items():
        print_table(title, ["what", "value"], [[name, f"{value:.4g}"] for name, value in values.items()])
    print(json.dumps(found))


if __name__ == "__main__":
    main()
