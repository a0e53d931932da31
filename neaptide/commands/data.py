"""``neaptide data``: inspect and tidy a data directory while no server uses it. Costs may be shown at any time."""

import argparse
import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from neaptide.commands.receipts import cost_lines, cost_objects
from neaptide.durations import DAY_S
from neaptide.server.settings import SettingsError
from neaptide.server.settings_sources import data_path, load_settings

if TYPE_CHECKING:
    import sqlalchemy as sa

    from neaptide.server.batches.storing.store import Store

MIB = 1 << 20
SHOWN_PROBLEMS = 100

Action = Callable[["Store", argparse.Namespace], int]


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser(
        "data",
        help="check, repair and clean up the data directory of a stopped server; show costs of keys",
        description="Checks, repairs and cleans up the data directory of a stopped server. Shows costs at any time.",
    )
    actions = parser.add_subparsers(required=True, metavar="ACTION")

    def action(name: str, help_text: str, run: Action) -> argparse.ArgumentParser:
        sub = actions.add_parser(name, help=help_text)
        sub.add_argument("--data-dir", metavar="DIR", help="the server's data directory (as for serve)")
        sub.add_argument("--store", metavar="URL", help="the server's database (as for serve)")
        sub.add_argument("--blobs", metavar="URL", help="the server's shared storage (as for serve)")
        sub.add_argument("--json", action="store_true", help="print one line of JSON and nothing else")
        sub.set_defaults(func=lambda args: _run(run, args))
        return sub

    action("sizes", "show how much space each part takes", _sizes)
    check = action("check", "compare every file and result with its checksum; exit status 1 if one differs", _check)
    check.add_argument(
        "--repair",
        action="store_true",
        help="rebuild result files from the database, and drop files that are missing or damaged for good; unfinished "
        "lines of a batch that needs a dropped file fail",
    )
    costs = action("costs", "show device time and computed tokens of each key and day; its server may run", _costs)
    costs.add_argument("--days", type=_days, default=31, metavar="N", help="show the last N days (31)")
    costs.set_defaults(func=_run_costs)
    prune = action("prune", "delete what has expired, and return the space to the disk", _prune)
    prune.add_argument("--moved-aside", action="store_true", help="also delete what is in moved-aside")
    prune.add_argument(
        "--batches-older-than", type=float, metavar="DAYS", help="also delete batches that ended at least this long ago"
    )


def _days(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of days")
    return int(text)


def _run(run: Action, args: argparse.Namespace) -> int:
    from neaptide.launch.sharing import sharing_of
    from neaptide.server.batches.storing.data_dir import StoreError
    from neaptide.server.batches.storing.store import Store, StoreUnavailableError

    try:
        settings = load_settings({"data_dir": args.data_dir, "store": args.store, "blobs": args.blobs})
        # An operator's command has no deadline: a large database takes long to read.
        store = Store(data_path(settings.data_dir), sharing_of(settings), limit_s=math.inf)
        store.open(create=False)
        try:
            return run(store, args)
        finally:
            store.close()
    except (SettingsError, StoreError, StoreUnavailableError, ValueError) as error:
        message = str(error)
    except OSError as error:
        message = f"{error.filename or 'the data directory'}: {error.strerror}"
    print(f"neaptide data: {message}", file=sys.stderr)
    return 2


def _show(args: argparse.Namespace, found: dict[str, Any], lines: list[str]) -> None:
    print(json.dumps(found) if args.json else "\n".join(lines))


def _sizes(store: "Store", args: argparse.Namespace) -> int:
    from neaptide.server.batches.storing import offline

    found = offline.sizes(store)
    lines = [f"{name:<14}{size / MIB:>12.1f} MiB" for name, size in found.bytes_of.items()]
    lines.append(f"{'total':<14}{sum(found.bytes_of.values()) / MIB:>12.1f} MiB")
    lines.append(
        f"{'reusable':<14}{found.reusable_bytes / MIB:>12.1f} MiB of the database; prune returns it to the disk"
    )
    lines += [f"{name:<14}{count:>12} rows" for name, count in found.rows_of.items()]
    _show(args, asdict(found), lines)
    return 0


def _run_costs(args: argparse.Namespace) -> int:
    """Reads beside a running server where the database is in the data directory."""
    from neaptide.server.batches.storing.data_dir import DATABASE_NAME, StoreError
    from neaptide.server.batches.storing.databases.sqlite import read_only

    try:
        settings = load_settings({"data_dir": args.data_dir, "store": args.store, "blobs": args.blobs})
        if settings.store is not None:
            return _run(_costs, args)
        with read_only(data_path(settings.data_dir) / DATABASE_NAME) as conn:
            return _show_costs(conn, args)
    except (SettingsError, StoreError) as error:
        print(f"neaptide data: {error}", file=sys.stderr)
        return 2


def _costs(store: "Store", args: argparse.Namespace) -> int:
    return store.read_blocking(_show_costs, args)


def _show_costs(conn: "sa.Connection", args: argparse.Namespace) -> int:
    from neaptide.server.batches.storing.cost_rows import costs_by_day

    since_day = int(time.time() // DAY_S) - args.days + 1
    costs = costs_by_day(conn, since_day)
    lines = list(cost_lines(costs)) if costs else ["no costs are recorded yet"]
    _show(args, {"costs": cost_objects(costs)}, lines)
    return 0


def _check(store: "Store", args: argparse.Namespace) -> int:
    from neaptide.server.batches.mending.repair import repair
    from neaptide.server.batches.storing import offline

    # Printed at once, because what was dropped cannot be read elsewhere.
    repairs = list(repair(store)) if args.repair else []
    found = offline.check(store)
    found.repairs = repairs
    lines = [*repairs, *found.problems[:SHOWN_PROBLEMS]]
    lines.append(f"{found.files} files and {found.results} results read, {len(found.problems)} problems")
    _show(args, asdict(found), lines)
    return 1 if found.problems else 0


def _prune(store: "Store", args: argparse.Namespace) -> int:
    from neaptide.server.batches.storing import offline

    what = offline.Prune(moved_aside=args.moved_aside, batches_older_than_days=args.batches_older_than)
    freed_bytes = offline.prune(store, what)
    _show(args, {"freed_bytes": freed_bytes}, [f"{freed_bytes / MIB:.1f} MiB returned to the disk"])
    return 0
