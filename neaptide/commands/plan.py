"""``neaptide plan``: the smallest capacity that meets the online targets in a trace's peak, and its offline
throughput."""

import argparse
import json
import math
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
from rich import box
from rich.console import Console
from rich.table import Table

from neaptide.cluster.capacity.cheapest import cheapest, credit_per_token, net_per_hour
from neaptide.cluster.capacity.measure import TARGETS
from neaptide.cluster.capacity.planner import Question, Watch, plan, within_context
from neaptide.cluster.capacity.result import Beside, OfflinePlan, Plan, Point
from neaptide.cluster.capacity.tuning import points_of, tuned
from neaptide.commands.outputs import JSON_HELP, check_plot, check_writable, draw, print_json, write_json
from neaptide.commands.simulate_tables import WIDTH, short_names
from neaptide.commands.simulation_flags import (
    DEFAULT_PROFILE,
    add_limits,
    add_load,
    check_flags,
    offline_of,
    online_of,
    profile_help,
    progress,
    scenario_of,
)
from neaptide.durations import DAY_S, HOUR_S, MINUTE_S
from neaptide.engine.scheduler.policies import find_policy
from neaptide.estimator.device_profile import DeviceProfile, load_profile
from neaptide.simulation.points import parse_points
from neaptide.simulation.replica import SimulationError
from neaptide.simulation.scenario import Scenario

AUTO, ON, OFF = "auto", "on", "off"
CPU = "cpu"
"""Beginning of the device's name in a profile of a server that does not plan its offline pool by itself."""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser(
        "plan", help="find the fewest GPUs that meet the latency targets at peak load, by simulation"
    )
    add = parser.add_argument
    add_load(parser)
    profiles_help = profile_help("device profiles, by name or file, of which the cheapest is recommended")
    add("--profile", nargs="+", default=[DEFAULT_PROFILE], metavar="NAME", help=profiles_help)
    price_help = "price of one replica for an hour, one per profile, in any currency (1 per device)"
    add("--price", type=float, nargs="+", metavar="X", help=price_help)
    find_help = "what to minimise: the number of replicas, or the KV memory of each (replicas)"
    add("--find", choices=("replicas", "kv"), default="replicas", help=find_help)
    add("--replicas", type=int, default=1, metavar="N", help="with --find kv: replicas that share the load (1)")
    add("--max-replicas", type=int, default=64, metavar="N", help="with --find replicas: largest number to try (64)")
    add(
        "--attainment", type=float, default=0.9, metavar="X", help="share of requests that must meet both targets (0.9)"
    )
    add("--peak-s", type=float, default=300.0, metavar="X", help="length of the peak in seconds (300)")
    margin_help = "seconds simulated before and after the peak, not counted (30)"
    add("--margin-s", type=float, default=30.0, metavar="X", help=margin_help)
    policy_help = (
        "scheduling policy, or several with commas; NAME@1536 and NAME@2048x512 set step tokens and slots (neaptide)"
    )
    add("--policy", default="neaptide", metavar="P", help=policy_help)
    tune_help = "try 12 pairs of step tokens and slots for each policy without its own, and keep the best; takes longer"
    add("--tune", action="store_true", help=tune_help)
    order_help = "order the offline work as a server does with this setting; auto: where a GPU's server would (auto)"
    add("--offline-plan", choices=(AUTO, ON, OFF), default=AUTO, help=order_help)
    add_limits(parser)
    add("--json", type=Path, metavar="OUT", help=JSON_HELP)
    plot_help = "draw attainment and offline tokens/s against size (.png, .pdf, .svg); takes more simulations"
    add("--plot", type=Path, metavar="OUT.png", help=plot_help)
    parser.set_defaults(func=run_command)


def run_command(args: argparse.Namespace) -> int:
    """Returns 0, 1 if no tried size meets the targets, or 2 if the command fails.

    The JSON line is printed for every result, even if an output file could not be written.
    """
    try:
        questions = _questions(args)
        plans = []
        for group in questions:
            plans.append(_planned(group, args))
            _warn(plans[-1], group[0])
    except OSError as error:
        return _refuse(f"{error.filename}: {error.strerror}" if error.filename else str(error))
    except (ValueError, SimulationError) as error:
        return _refuse(str(error))
    best = cheapest(plans)
    found = _json(args, questions, plans, best)
    line = json.dumps(found, allow_nan=False)
    _show(args, questions, plans, best)
    status = 0 if best is not None else 1
    try:
        write_json(line, args.json)
        if args.plot is not None:
            draw(lambda figure: _plot(figure, plans, questions[0][0]), args.plot)
    except OSError as error:
        status = _refuse(f"{error.filename}: {error.strerror}")
    print_json(line, args.json)
    return status


def _refuse(message: str) -> int:
    print(f"neaptide plan: {message}", file=sys.stderr)
    return 2


def _planned(questions: Sequence[Question], args: argparse.Namespace) -> Plan:
    """The plan of a profile and a policy, with the best of its limits if there are several."""
    several = len(questions) > 1 or len(parse_points(args.policy)) > 1

    def watch_of(question: Question) -> Watch:
        return lambda name: progress(f"{question.policy}: {name}" if several else name, says_so=True)

    if len(questions) == 1:
        return plan(questions[0], watch_of(questions[0]))
    by_name = {question.policy: question for question in questions}
    points = parse_points(",".join(by_name))
    return tuned(points, lambda point: plan(by_name[str(point)], watch_of(by_name[str(point)])))


def _questions(args: argparse.Namespace) -> list[list[Question]]:
    """The questions of each profile and policy, one for each pair of limits. Raises ValueError with one line."""
    _check(args)
    points = parse_points(args.policy)
    profiles = [load_profile(name) for name in args.profile]
    online, offline = online_of(args), offline_of(args)
    bases = [scenario_of(args, profile) for profile in profiles]
    trace = within_context(online, bases[0])
    if not trace.requests:
        raise ValueError(f"no prompt of {args.online} fits into {args.max_model_len} tokens: raise --max-model-len")
    if trace.num_left_out:
        _note(f"{trace.num_left_out} requests exceed {args.max_model_len} tokens and are skipped")
    if trace.num_cut:
        _note(f"{trace.num_cut} requests have more output than the limit and are truncated")
    question = Question(
        base=bases[0],
        trace=trace.requests,
        offline=offline,
        find=args.find,
        attainment=args.attainment,
        peak_s=args.peak_s,
        margin_s=args.margin_s,
        replicas=args.replicas,
        max_replicas=args.max_replicas,
        offline_at_every_size=args.plot is not None,
    )
    prices = args.price or [None] * len(profiles)
    return [
        [
            replace(question, base=_ordered(each.of(base), args), policy=str(each), price_per_hour=price)
            for each in (points_of(point.policy) if args.tune and point.step_tokens is None else [point])
        ]
        for base, price in zip(bases, prices, strict=True)
        for point in points
    ]


def _ordered(scenario: Scenario, args: argparse.Namespace) -> Scenario:
    """The scenario with the order in which a server takes its offline work.

    Rows keep their order, unless the policy's own order replaces it or the server plans its pool.
    """
    is_wanted = args.offline_plan == ON or (args.offline_plan == AUTO and not _is_cpu(scenario.profile))
    if not is_wanted or scenario.order is not None or find_policy(scenario.policy).server_order is None:
        return scenario
    return scenario.planned_as_served()


def _is_cpu(profile: DeviceProfile) -> bool:
    return profile.name.startswith(CPU)


def _check(args: argparse.Namespace) -> None:
    check_flags(args)
    if args.online == "none":
        raise ValueError("a plan needs online load: name a trace or a file with --online")
    if not 0.0 < args.attainment <= 1.0:
        raise ValueError("--attainment must be above 0 and at most 1")
    if not 0.0 < args.peak_s < math.inf:
        raise ValueError("--peak-s must be positive")
    if not 0.0 <= args.margin_s < math.inf:
        raise ValueError("--margin-s must be at least 0")
    for name in ("replicas", "max_replicas"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1")
    if args.find == "replicas" and args.replicas != 1:
        raise ValueError("--replicas needs --find kv; to limit the number of replicas use --max-replicas")
    if args.price is not None:
        if len(args.price) != len(args.profile):
            raise ValueError(
                f"--price has {len(args.price)} numbers for {len(args.profile)} profiles: give one for each"
            )
        if not all(0.0 < price < math.inf for price in args.price):
            raise ValueError("--price must be positive")
    if args.json is not None:
        check_writable(args.json)
    if args.plot is not None:
        check_plot(args.plot)


def _note(text: str) -> None:
    print(f"neaptide plan: {text}", file=sys.stderr)


def _warn(found: Plan, question: Question) -> None:
    if not found.is_monotone:
        _note(f"{found.profile}: a larger size fails where a smaller one is enough: add some reserve")
    besides = [] if found.answer is None or found.answer.beside is None else [found.answer.beside]
    if found.offline is not None:
        besides.append(found.offline.whole)
    if not all(each.valid for each in besides):
        _note(f"{found.profile}: the offline pool ran out of work: its rate is not valid")
    if not all(each.holds for each in besides):
        _note(f"{found.profile}: with offline work, fewer than {question.attainment:.1%} meet both targets")


def _json(
    args: argparse.Namespace, questions: Sequence[Sequence[Question]], plans: Sequence[Plan], best: Plan | None
) -> dict[str, Any]:
    credit = credit_per_token(plans)
    return {
        "online": args.online,
        "online_window": args.online_window,
        "speed": args.speed,
        "offline": [one.name for one in questions[0][0].offline],
        "find": args.find,
        "attainment": args.attainment,
        "peak_s": args.peak_s,
        "margin_s": args.margin_s,
        "policy": args.policy,
        "tune": args.tune,
        "offline_plan": args.offline_plan,
        "seed": args.seed,
        "plans": [
            msgspec.to_builtins(each)
            | {
                "cost_per_hour": each.cost,
                "price_per_million_offline_tokens": each.price_per_million_tokens,
                "net_cost_per_hour": net_per_hour(each, credit),
                "settings": msgspec.to_builtins(_asked(group, each).base.settings()),
            }
            for group, each in zip(questions, plans, strict=True)
        ],
        "cheapest": None if best is None else best.profile,
        "cheapest_policy": None if best is None else best.policy,
    }


def _asked(questions: Sequence[Question], found: Plan) -> Question:
    """The question that the plan answers."""
    return next(question for question in questions if question.policy == found.policy)


# ---- text ----


def _show(
    args: argparse.Namespace, questions: Sequence[Sequence[Question]], plans: Sequence[Plan], best: Plan | None
) -> None:
    console = Console(width=WIDTH)

    def say(text: str) -> None:
        """Prints a line, folded below its indent."""
        indent = " " * (len(text) - len(text.lstrip(" ")))
        folded = textwrap.fill(text, WIDTH, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False)
        console.print(folded, highlight=False, markup=False, soft_wrap=True)

    base = questions[0][0].base
    say(
        f"{args.online} at {args.speed:g} times its speed; TTFT {base.ttft_slo_s:g} s and TPOT "
        f"{1e3 * base.tpot_slo_s:g} ms, both for {args.attainment:.1%} of the requests"
    )
    for group, each in zip(questions, plans, strict=True):
        say("")
        say(f"{each.profile}, policy {each.policy}")
        if each.limits:
            console.print(_limits_table(each), highlight=False)
        console.print(_table(each), highlight=False)
        for line in _lines(_asked(group, each), each):
            say(line)
    if len(plans) > 1 and best is not None:
        console.print(_costs_table(plans, best), highlight=False)
        policy = f" with {best.policy}" if len({each.policy for each in plans}) > 1 else ""
        say(f"cheapest: {best.profile}{policy}, {_cost(best)}")
        if credit_per_token(plans):
            say("  net: per hour, less what its offline work would cost on the cheapest of these devices alone")


def _new_table(padding: int = 1) -> Table:
    """
    Args:
        padding: columns to the right of each cell, besides the one between cells.
    """
    return Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, padding, 0, 0))


def _table(found: Plan) -> Table:
    table = _new_table()
    headings = ["replicas", "KV GiB\neach", "KV blocks\neach", "in time %\nTTFT/TPOT/both", "targets"]
    headings += ["offline\ntok/s", "in time %\nwith it"]
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True, vertical="bottom")
    for point in found.tried:
        table.add_row(*_cells(point), style="bold" if point is found.answer else "")
    return table


def _limits_table(found: Plan) -> Table:
    """The step tokens and slots that were tried."""
    table = _new_table()
    table.add_column("step tokens x slots", vertical="bottom")
    for heading in ("replicas", "in time %\nin the peak", "offline\ntok/s"):
        table.add_column(heading, justify="right", no_wrap=True, vertical="bottom")
    for each in found.limits:
        attained, rate = each.attained, each.offline_tokens_per_s
        table.add_row(
            each.policy.rpartition("@")[2],
            "-" if each.replicas is None else str(each.replicas),
            "-" if attained is None else f"{100 * attained:.1f}",
            "-" if rate is None else f"{rate:,.0f}",
            style="bold" if each.policy == found.policy else "",
        )
    return table


def _costs_table(plans: Sequence[Plan], best: Plan) -> Table:
    """Table of plans with their costs by the hour and by the offline token."""
    table, credit = _new_table(padding=0), credit_per_token(plans)  # profiles have long names
    for heading in ("profile", "policy"):
        table.add_column(heading, overflow="fold", vertical="bottom")
    for heading in ("replicas", "per hour", "offline\ntok/s", "per million\noffline tokens", "net"):
        table.add_column(heading, justify="right", no_wrap=True, vertical="bottom")
    for policy, each in zip(_policies(plans), plans, strict=True):
        rate = None if each.offline is None else each.offline.whole.tokens_per_s
        numbers = (each.cost, each.price_per_million_tokens, net_per_hour(each, credit))
        cost, price, net = ("-" if number is None else f"{number:.4g}" for number in numbers)
        table.add_row(
            each.profile,
            policy,
            "-" if each.answer is None else str(each.answer.replicas),
            cost,
            "-" if rate is None else f"{rate:,.0f}",
            price,
            net,
            style="bold" if each is best else "",
        )
    return table


def _policies(plans: Sequence[Plan]) -> list[str]:
    """The plans' policies, without their modules unless two would be the same."""
    names = list(dict.fromkeys(each.policy for each in plans))
    short = dict(zip(names, short_names(names), strict=True))
    return [short[each.policy] for each in plans]


def _cells(point: Point) -> Iterator[str]:
    yield str(point.replicas)
    yield f"{point.kv_gib:.2f}"
    yield f"{point.kv_blocks:,}"
    yield "/".join(f"{100 * point.attainment[name]:.1f}" for name in TARGETS)
    yield "hold" if point.holds else "FAIL"
    yield "-" if point.beside is None else f"{point.beside.tokens_per_s:.0f}"
    yield "-" if point.beside is None else f"{100 * point.beside.attainment['both']:.1f}"


def _lines(question: Question, found: Plan) -> Iterator[str]:
    peak = found.peak
    yield (
        f"{found.profile}: the peak is {peak.start_s:.1f} to {peak.end_s:.1f} s of the trace, {peak.requests:,} "
        f"requests with {peak.work_s:.1f} s of work for one replica"
    )
    if found.answer is None:
        yield f"  no answer: {_advice(question, found)}"
        return
    below = "there is no smaller size" if found.one_smaller is None else f"too few: {_size(found.one_smaller)}"
    yield f"  answer: {_size(found.answer)}; {below}; cost: {_cost(found)}"
    if found.offline is not None and found.answer.beside is not None:
        yield from _offline_lines(found.offline, found.answer.beside)


def _advice(question: Question, found: Plan) -> str:
    said = f"{_size(found.tried[-1])} is the largest size tried; "
    if question.find == "kv":
        return said + "share the load (--replicas N), or search for a number of replicas (--find replicas)"
    return said + "raise --max-replicas, relax the targets, or use a faster device"


def _size(point: Point) -> str:
    replicas = f"{point.replicas} replica{'s' if point.replicas > 1 else ''}"
    return f"{replicas} with {point.kv_gib:.2f} GiB of KV ({point.attainment['both']:.1%} attained)"


def _cost(found: Plan) -> str:
    has_price, price = found.price_per_hour is not None, found.price_per_million_tokens
    cost = f"{found.cost:g} per hour" if has_price else f"{found.cost:g} device{'s' if found.cost != 1 else ''}"
    if price is None:
        return cost
    return f"{cost}, {price:.4g}{'' if has_price else ' device hours'} per million offline tokens"


def _offline_lines(offline: OfflinePlan, at_peak: Beside) -> Iterator[str]:
    samples = f" ({offline.whole.samples} samples)" if offline.whole.samples > 1 else ""
    yield (
        f"  over the whole trace{samples} {offline.whole.tokens_per_s:,.0f} offline tok/s, "
        f"{offline.tokens_per_day:,.0f} per day ({offline.whole.attainment['both']:.1%} attained), "
        f"in the peak {at_peak.tokens_per_s:,.0f} ({at_peak.attainment['both']:.1%})"
    )
    low, high = ("never" if each is None else _duration(each) for each in offline.finish_s)
    yield f"  {offline.rows:,} rows of {offline.tokens:,} tokens take {low} to {high}"


def _duration(seconds: float) -> str:
    for unit_s, unit in ((DAY_S, "days"), (HOUR_S, "h"), (MINUTE_S, "min")):
        if seconds >= 2 * unit_s:
            return f"{seconds / unit_s:.1f} {unit}"
    return f"{seconds:.1f} s"


# ---- plot ----


def _plot(figure: Any, plans: Sequence[Plan], question: Question) -> None:
    """Attainment against size and, with offline work, its rate."""
    with_offline = bool(question.offline)
    every = figure.subplots(1, 2 if with_offline else 1, squeeze=False)[0]
    base, finds_replicas = question.base, question.find == "replicas"
    figure.suptitle(
        f"{'Replicas' if finds_replicas else 'KV memory'} for the peak: TTFT {base.ttft_slo_s:g} s and TPOT "
        f"{1e3 * base.tpot_slo_s:g} ms for {question.attainment:.1%} of the requests"
    )
    several = len({each.policy for each in plans}) > 1
    for policy, each in zip(_policies(plans), plans, strict=True):
        label = f"{each.profile}, {policy}" if several else each.profile
        sizes = [point.replicas if finds_replicas else point.kv_gib for point in each.tried]
        every[0].plot(sizes, [100 * point.attainment["both"] for point in each.tried], marker="o", label=label)
        if with_offline:
            rates = [(size, p.beside.tokens_per_s) for size, p in zip(sizes, each.tried, strict=True) if p.beside]
            every[1].plot([size for size, _ in rates], [rate for _, rate in rates], marker="o", label=label)
    every[0].axhline(100 * question.attainment, linestyle="--", color="grey", label=f"{question.attainment:.1%} wanted")
    every[0].set(title="Chats alone", ylabel="requests of the peak in time, %")
    if with_offline:
        every[1].set(title="Offline work beside the chats", ylabel="offline tokens/s in the peak")
    for axes in every:
        axes.set_xlabel("replicas" if finds_replicas else "KV memory of a replica, GiB")
        axes.set_ylim(bottom=0)
        axes.legend()
        if finds_replicas:
            axes.xaxis.get_major_locator().set_params(integer=True)
    every[0].set_ylim(top=105)
