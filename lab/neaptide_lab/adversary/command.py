"""``neaptide adversary``: searches for small loads that break promises of a policy, and replays those it found."""

import argparse
import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from neaptide.engine.extensions import ExtensionError
from neaptide.engine.scheduler.policies import find_policy
from neaptide.estimator.device_profile import load_profile
from neaptide_lab.adversary.case import PROFILES, Case
from neaptide_lab.adversary.found import Found, found_files, read_found, write_found
from neaptide_lab.adversary.promises import PROMISES, Breach
from neaptide_lab.adversary.search import Budget, judged, search
from neaptide_lab.adversary.shrink import shrunk

ALL = "all"
SHRINK_SHARE = 0.35
"""Fraction of a promise's seconds for making its case smaller."""
KEPT_SHARE = 0.5
"""Fraction of the first breach that a smaller case must keep."""
CLEAR_BREACH = 0.1
"""A search ends early at a breach of this amount, if asked to."""
TABLE_WIDTH = 118


@dataclass(slots=True, frozen=True)
class Result:
    """What a search for one promise gave."""

    promise: str
    tries: int
    seconds_s: float
    case: Case | None
    breach: Breach | None
    path: Path | None = None

    @property
    def is_broken(self) -> bool:
        return self.breach is not None and self.breach.is_broken

    def to_json(self) -> dict[str, Any]:
        return {
            "promise": self.promise,
            "tries": self.tries,
            "seconds": round(self.seconds_s, 1),
            "broken": self.is_broken,
            "amount": None if self.breach is None else round(self.breach.amount, 4),
            "text": None if self.breach is None else self.breach.text,
            "requests": None if self.case is None else self.case.num_requests,
            "case": msgspec.to_builtins(self.case) if self.is_broken else None,
            "file": None if self.path is None else str(self.path),
        }


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser(
        "adversary",
        help="search for the smallest load that breaks a promise of a policy",
        description="Promises: " + "; ".join(f"{one.name}: {one.about}" for one in PROMISES.values()) + ".",
    )
    parser.add_argument("--policy", default="neaptide", metavar="NAME", help="the policy to attack (neaptide)")
    parser.add_argument(
        "--promise", default=ALL, metavar="NAME", help=f"{', '.join(PROMISES)}; several with commas; {ALL} by default"
    )
    parser.add_argument("--seconds", type=float, metavar="X", help="for all promises together (600)")
    parser.add_argument(
        "--tries", type=int, metavar="N", help="cases for each promise; gives the same result on every machine"
    )
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="of the search (1)")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes (1)")
    profile_help = f"a profile of machines; may be repeated ({', '.join(PROFILES)})"
    parser.add_argument("--profile", action="append", metavar="NAME", help=profile_help)
    parser.add_argument("--until-clear", action="store_true", help="end each search at the first clear breach")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write the found cases into this directory")
    replay_help = "replay a found case, or all in a directory, under --policy; no search"
    parser.add_argument("--replay", type=Path, metavar="PATH", help=replay_help)
    parser.set_defaults(func=run_command)


def run_command(args: argparse.Namespace) -> int:
    """Returns 0, 1 if a promise is broken, 2 if the command cannot be carried out."""
    try:
        find_policy(args.policy)
        names = _promises(args.promise)
        if args.jobs < 1 or (args.tries is not None and args.tries < 1):
            raise ValueError("--jobs and --tries must be at least 1")
        for profile in args.profile or ():
            load_profile(profile)
        if args.replay is not None:
            return _show_replays(args.replay, args.policy, names)
        if args.out is not None:
            args.out.mkdir(parents=True, exist_ok=True)
    except (ValueError, ExtensionError, OSError) as error:
        print(f"neaptide adversary: {error}", file=sys.stderr)
        return 2
    seconds_s = args.seconds if args.seconds is not None else (math.inf if args.tries is not None else 600.0)
    results = [_attack(name, args, seconds_s / len(names)) for name in names]
    _show(results)
    line = {"policy": args.policy, "seed": args.seed, "results": [result.to_json() for result in results]}
    print(json.dumps(line, allow_nan=False))
    return 1 if any(result.is_broken for result in results) else 0


def _promises(text: str) -> Sequence[str]:
    names = list(PROMISES) if text == ALL else text.split(",")
    for name in names:
        if name not in PROMISES:
            raise ValueError(f"there is no promise {name!r}; there are: {', '.join(PROMISES)}, {ALL}")
    return names


def _attack(name: str, args: argparse.Namespace, seconds_s: float) -> Result:
    """Searches, makes the best case smaller, and writes it."""
    begun_s = time.monotonic()

    def say(line: str) -> None:
        print(f"{name} {time.monotonic() - begun_s:.0f} s, {line}", file=sys.stderr, flush=True)

    state = search(
        name,
        args.policy,
        args.seed,
        Budget((1.0 - SHRINK_SHARE) * seconds_s, args.tries),
        profiles=args.profile or PROFILES,
        jobs=args.jobs,
        stop_at=CLEAR_BREACH if args.until_clear else math.inf,
        on_progress=say,
    )
    if state.best is None or not state.best[1].is_broken:
        case, breach = state.best or (None, None)
        return Result(name, state.tries, time.monotonic() - begun_s, case, breach)
    case, breach = state.best
    siblings = PROMISES[name].siblings
    least = KEPT_SHARE * breach.amount
    left_s = seconds_s - (time.monotonic() - begun_s)
    case = shrunk(case, lambda smaller: judged(name, args.policy, smaller, siblings).amount >= least, seconds_s=left_s)
    breach = judged(name, args.policy, case, siblings)
    path = None
    if args.out is not None:
        path = args.out / f"{name}-{args.policy}-{args.seed}.json"
        write_found(Found(promise=name, policy=args.policy, about=breach.text, siblings=siblings, case=case), path)
    return Result(name, state.tries, time.monotonic() - begun_s, case, breach, path)


def _show(results: Sequence[Result]) -> None:
    table = Table("promise", "tries", "seconds", "broken by", "requests", "what happened", width=TABLE_WIDTH)
    for one in results:
        amount = "" if one.breach is None else f"{one.breach.amount:+.3f}"
        requests = "" if one.case is None else str(one.case.num_requests)
        text = "" if one.breach is None else one.breach.text
        table.add_row(one.promise, str(one.tries), f"{one.seconds_s:.0f}", amount, requests, text)
    Console(width=TABLE_WIDTH).print(table)


def _show_replays(path: Path, policy: str, names: Sequence[str]) -> int:
    table = Table("case", "promise", "broken by", "requests", "what happened", width=TABLE_WIDTH)
    lines = []
    for file in found_files(path):
        found = read_found(file)
        if found.promise not in names:
            continue
        breach = found.breach(policy)
        table.add_row(file.stem, found.promise, f"{breach.amount:+.3f}", str(found.case.num_requests), breach.text)
        lines.append({"case": file.stem, "promise": found.promise, "amount": breach.amount, "text": breach.text})
    Console(width=TABLE_WIDTH).print(table)
    print(json.dumps({"policy": policy, "replayed": lines}))
    return 1 if any(line["amount"] > 0 for line in lines) else 0  # type: ignore[operator]
