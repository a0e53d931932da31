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
from neaptide_lab.adversary.case import PROFILES, Case, to_json
from neaptide_lab.adversary.found import Found, found_files, read_found, write_found
from neaptide_lab.adversary.promises import PROMISES
from neaptide_lab.adversary.search import KINDS, Budget, Tried, judged, niche_of, search
from neaptide_lab.adversary.shrink import shrunk

ALL = "all"
SHRINK_SHARE = 0.5
"""Fraction of a promise's seconds for making its case smaller."""
KEPT_SHARE = 0.5
"""Fraction of the first breach that a smaller case must keep."""
CLEAR_BREACH = 0.1
"""A search ends early at a breach of this amount, if asked to."""
TABLE_WIDTH = 118


@dataclass(slots=True, frozen=True)
class Result:
    """Result of a search for one promise."""

    promise: str
    niche: str
    num_tries: int
    seconds_s: float
    best: Tried | None
    """The case that was made smaller, or the nearest one if the promise was kept; None if no case could be tried."""
    path: Path | None = None

    @property
    def is_broken(self) -> bool:
        return self.best is not None and self.best.breach.is_broken

    def to_json(self) -> dict[str, Any]:
        best = self.best
        return {
            "promise": self.promise,
            "niche": self.niche,
            "tries": self.num_tries,
            "seconds": round(self.seconds_s, 1),
            "broken": self.is_broken,
            "amount": None if best is None else round(best.breach.amount, 4),
            "text": None if best is None else best.breach.text,
            "requests": None if best is None else best.case.num_requests,
            "case": msgspec.to_builtins(best.case) if best is not None and self.is_broken else None,
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
    kind_help = f"try only this kind of cases: {', '.join(KINDS)}; the case that is made smaller may lose it"
    parser.add_argument("--kind", choices=KINDS, default="", metavar="KIND", help=kind_help)
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
    results = [result for name in names for result in _attack(name, args, seconds_s / len(names))]
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


def _attack(name: str, args: argparse.Namespace, seconds_s: float) -> list[Result]:
    """Searches, makes the best broken case of each niche smaller, and writes those that are different."""
    begun_s = time.monotonic()

    def say(line: str) -> None:
        print(f"{name} {time.monotonic() - begun_s:.0f} s, {line}", file=sys.stderr, flush=True)

    state = search(
        name,
        args.policy,
        args.seed,
        Budget((1.0 - SHRINK_SHARE) * seconds_s, args.tries),
        profiles=args.profile or PROFILES,
        kind=args.kind,
        jobs=args.jobs,
        stop_at=CLEAR_BREACH if args.until_clear else math.inf,
        on_progress=say,
    )
    for one in state.failed:
        say(f"the engine failed: {one.breach.failure}: {to_json(one.case).decode()}")
    broken, results = state.broken, dict[str, Result]()
    for number, one in enumerate(broken):
        left_s = seconds_s - (time.monotonic() - begun_s)
        small = _smaller(name, args.policy, one, left_s / (len(broken) - number))
        niche = niche_of(small.case)
        say(f"{niche_of(one.case)}: {one.case.num_requests} requests become {small.case.num_requests} ({niche})")
        if niche not in results:
            path = _write(name, args, niche, small) if args.out is not None else None
            results[niche] = Result(name, niche, state.num_tries, time.monotonic() - begun_s, small, path)
    if results:
        return list(results.values())
    return [Result(name, "", state.num_tries, time.monotonic() - begun_s, state.best)]


def _smaller(promise: str, policy: str, one: Tried, seconds_s: float) -> Tried:
    siblings, least = PROMISES[promise].siblings, KEPT_SHARE * one.breach.amount

    def is_broken(case: Case) -> bool:
        # The case itself must be broken too; this spares the simulations of the siblings of most others.
        return all(judged(promise, policy, case, count).amount >= least for count in (1, siblings))

    case = shrunk(one.case, is_broken, seconds_s=seconds_s)
    return Tried(case, judged(promise, policy, case, siblings))


def _write(promise: str, args: argparse.Namespace, niche: str, one: Tried) -> Path:
    path: Path = args.out / f"{promise}-{args.policy}-{niche.replace(', ', '-').replace(' ', '-')}-{args.seed}.json"
    siblings = PROMISES[promise].siblings
    found = Found(promise=promise, policy=args.policy, about=one.breach.text, siblings=siblings, case=one.case)
    write_found(found, path)
    return path


def _show(results: Sequence[Result]) -> None:
    table = Table("promise", "kind of case", "tries", "seconds", "broken by", "requests", "first of the siblings")
    for one in results:
        cells = ["", "", ""]
        if one.best is not None:
            cells = [f"{one.best.breach.amount:+.3f}", str(one.best.case.num_requests), one.best.breach.text]
        table.add_row(one.promise, one.niche, str(one.num_tries), f"{one.seconds_s:.0f}", *cells)
    Console(width=TABLE_WIDTH).print(table)


def _show_replays(path: Path, policy: str, names: Sequence[str]) -> int:
    table = Table("case", "promise", "broken by", "requests", "first of the siblings")
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
