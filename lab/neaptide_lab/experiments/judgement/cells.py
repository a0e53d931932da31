"""The cells of every requirement, on calibration loads and on report loads.

Constants of a policy are chosen on the first and reported on the second. No seed and no window of a recorded trace is
in both.
"""

from collections.abc import Callable
from itertools import product
from typing import Literal

import msgspec

from neaptide_lab.experiments.judgement import design
from neaptide_lab.experiments.judgement.cell import LIVE_PROFILE, Cell, Part
from neaptide_lab.experiments.judgement.design import A100, FLOOD, H100, WARM_UP_S

SetName = Literal["calibration", "report"]
CALIBRATION: SetName = "calibration"
REPORT: SetName = "report"
SETS: tuple[SetName, ...] = (CALIBRATION, REPORT)

CLIENT_LIMIT_TOKENS = 1024
NUM_SEEDS = 8


def seeds_of(name: SetName, count: int) -> range:
    first = 0 if name == CALIBRATION else 100
    return range(first, first + count)


def _own_seed(name: SetName) -> int:
    """The seed of experiments that are reported by themselves too: what they show is never calibrated on."""
    return 1 if name == CALIBRATION else 0


# ---- the live measure ----

W5_CEILING_TOKENS_PER_S = {LIVE_PROFILE: 1304.6, "cpu-111m": 302.2}
W5_TPOT_SLO_S = {
    LIVE_PROFILE: {0.1: 0.02402, 0.2: 0.03026, 0.4: 0.04296},
    "cpu-111m": {0.1: 0.14867, 0.2: 0.17315, 0.4: 0.27544},
}
"""Measured on c. e7995404, as the live measure does: 2.4 times the TPOT of online work alone."""
W5_LENGTHS = 128, 32
W5_DURATION_S, W5_WINDOW_S = 150.0, (10.0, 145.0)


def w5(name: SetName) -> list[Cell]:
    return [
        _w5(profile, load, seed, targets_s[load])
        for (profile, targets_s), load, seed in product(
            W5_TPOT_SLO_S.items(), (0.1, 0.2, 0.4), seeds_of(name, NUM_SEEDS)
        )
    ]


def _w5(profile: str, load: float, seed: int, tpot_slo_s: float) -> Cell:
    rate_rps = load * W5_CEILING_TOKENS_PER_S[profile] / sum(W5_LENGTHS)
    return Cell(
        name=f"w5 {profile} {load:g} seed {seed}",
        group="w5",
        case=f"{profile} {load:g}",
        profile=profile,
        online=(Part("fixed-128-32", (0.0, W5_DURATION_S), rate_rps=rate_rps),),
        offline="fixed-256-64",
        ttft_slo_s=5.0 * tpot_slo_s,
        tpot_slo_s=tpot_slo_s,
        context_tokens=1024,
        window_s=W5_WINDOW_S,
        drain_s=60.0,
        noise=0.08,
        seed=seed,
    )


# ---- overload ----

OVERLOAD_CAPACITY_RPS = {(2000, 150): 5.244, (500, 250): 14.163, (8000, 100): 1.2953}
OVERLOADS = (0.8, 1.0, 1.5, 2.0, 3.0)
OVERLOAD_WINDOW_S = 60.0


def overload(name: SetName) -> list[Cell]:
    return [
        _overload(lengths, load, seed, is_beside)
        for lengths, load, is_beside, seed in product(
            OVERLOAD_CAPACITY_RPS, OVERLOADS, (False, True), seeds_of(name, 2)
        )
    ]


def _overload(lengths: tuple[int, int], load: float, seed: int, is_beside: bool) -> Cell:
    prompt, output = lengths
    where = "beside" if is_beside else "alone"
    return Cell(
        name=f"overload {prompt}/{output} {load:g}x {where} seed {seed}",
        group="overload",
        case=f"{prompt}/{output} {where}",
        profile=A100,
        online=(
            Part(
                f"fixed-{prompt}-{output}",
                (0.0, OVERLOAD_WINDOW_S),
                rate_rps=load * OVERLOAD_CAPACITY_RPS[lengths],
            ),
        ),
        offline=FLOOD if is_beside else "",
        context_tokens=16_384,
        limit_tokens=CLIENT_LIMIT_TOKENS,
        drain_s=1.0 + output * 0.05,
        seed=seed,
    )


# ---- BROS's cells ----

BROS_MODELS = {
    "OPT-13B": ("a100-40g-sxm-opt-13b-tp2", 2048),
    "OPT-30B": ("a100-40g-sxm-opt-30b-tp4", 2048),
    "Llama-3-70B": ("a100-80g-llama-3-70b-tp8", 8192),
}
BROS_LENGTHS = {"ShareGPT": "bros-rt-sharegpt", "LMSYS": "bros-rt-lmsys"}
BROS_RATES_RPS = (3.0, 6.0, 9.0, 12.0, 15.0)


def bros(name: SetName) -> list[Cell]:
    return [
        Cell(
            name=f"bros {model} {lengths} {rate_rps:g}/s",
            group="bros",
            case=f"{model} {lengths}",
            profile=profile,
            online=(Part(f"{source}@{rate_rps:g}", (0.0, 240.0)),),
            offline="bros-be",
            ttft_slo_s=0.4,
            tpot_slo_s=0.2,
            context_tokens=context,
            drain_s=3600.0,
            noise=0.0,
            seed=_own_seed(name),
            with_work=True,
        )
        for (model, (profile, context)), (lengths, source), rate_rps in product(
            BROS_MODELS.items(), BROS_LENGTHS.items(), BROS_RATES_RPS
        )
    ]


# ---- Echo's set-up ----

ECHO_WINDOWS_S: dict[SetName, tuple[float, float]] = {CALIBRATION: (1000.0, 1120.0), REPORT: (600.0, 720.0)}
ECHO_SPEED = 0.7
ECHO_SETS = ("sharegpt_lengths", "loogle-qa-short", "loogle-qa-long")


def echo(name: SetName) -> list[Cell]:
    return [
        Cell(
            name=f"echo {offline or 'alone'}",
            group="echo",
            case=offline or "alone",
            profile=A100,
            online=(Part("azure_conv_2023", ECHO_WINDOWS_S[name], ECHO_SPEED),),
            offline=offline,
            context_tokens=32_768,
            limit_tokens=CLIENT_LIMIT_TOKENS,
        )
        for offline in ("", *ECHO_SETS)
    ]


# ---- long contexts ----

LONG_LOADS: dict[str, tuple[dict[SetName, tuple[float, float]], tuple[float, ...], int]] = {
    "mooncake_synthetic": ({CALIBRATION: (0.0, 200.0), REPORT: (380.0, 580.0)}, (0.5, 1.0), 131_072),
    "mooncake_conversation": ({CALIBRATION: (1000.0, 1080.0), REPORT: (600.0, 680.0)}, (0.4, 0.6), 32_768),
}
"""Windows, speeds and context of each trace."""


def long(name: SetName) -> list[Cell]:
    return [
        Cell(
            name=f"long {trace} at {speed:g} {'beside' if offline else 'alone'}",
            group="long",
            case=f"{trace} at {speed:g}",
            profile=H100,
            online=(Part(trace, windows_s[name], speed),),
            offline=offline,
            warm_up_s=WARM_UP_S if offline else 0.0,
            context_tokens=context,
            limit_tokens=CLIENT_LIMIT_TOKENS,
        )
        for trace, (windows_s, speeds, context) in LONG_LOADS.items()
        for speed, offline in product(speeds, ("", FLOOD))
    ]


# ---- the seven loads of the rivals ----

MIXED_SPEED, MIXED_LONG_SPEED = 0.6, 0.24
RIVAL_LOADS: dict[str, tuple[dict[SetName, tuple[Part, ...]], str, int]] = {
    "chats": (
        {
            CALIBRATION: (Part("azure_conv_2023", (1200.0, 1440.0), 1.2),),
            REPORT: (Part("azure_conv_2023", (600.0, 840.0), 1.2),),
        },
        "sharegpt_lengths",
        16_384,
    ),
    "code": (
        {
            CALIBRATION: (Part("azure_code_2023", (180.0, 400.0), 1.1),),
            REPORT: (Part("azure_code_2023", (1133.0, 1353.0), 1.1),),
        },
        "loogle-qa-short",
        16_384,
    ),
    "long contexts": (
        {
            CALIBRATION: (Part("mooncake_conversation", (1200.0, 1280.0), 0.4),),
            REPORT: (Part("mooncake_conversation", (600.0, 680.0), 0.4),),
        },
        "sharegpt_lengths",
        32_768,
    ),
    "reasoning": (
        {
            CALIBRATION: (Part("servegen_r1_resampled", (1000.0, 1320.0), 1.6),),
            REPORT: (Part("servegen_r1_resampled", (600.0, 920.0), 1.6),),
        },
        "sharegpt_lengths",
        16_384,
    ),
    "day curve": (
        {
            CALIBRATION: (Part("echo-day@0.02", (14_400.0, 50_400.0), 180.0),),
            REPORT: (Part("echo-day@0.02", (14_400.0, 50_400.0), 180.0),),
        },
        "sharegpt_lengths",
        16_384,
    ),
    "burst": (
        {
            CALIBRATION: (Part("echo-day@2", (46_700.0, 46_900.0)),),
            REPORT: (Part("echo-day@2", (46_700.0, 46_900.0)),),
        },
        "sharegpt_lengths",
        16_384,
    ),
    "mixed lengths": (
        {
            CALIBRATION: (
                Part("azure_conv_2023", (1200.0, 1320.0), MIXED_SPEED),
                Part("azure_code_2023", (180.0, 300.0), MIXED_SPEED),
                Part("mooncake_conversation", (1200.0, 1248.0), MIXED_LONG_SPEED),
            ),
            REPORT: (
                Part("azure_conv_2023", (600.0, 720.0), MIXED_SPEED),
                Part("azure_code_2023", (1133.0, 1253.0), MIXED_SPEED),
                Part("mooncake_conversation", (600.0, 648.0), MIXED_LONG_SPEED),
            ),
        },
        "sharegpt_lengths",
        32_768,
    ),
}
"""Online parts of each set, the offline set, and the context. Made days differ by their seed."""
RIVAL_POINTS = ("1024x256", "512x256", "1536x256", "1024x128", "2048x128", "512x128")
"""Step tokens and seats of ``priority`` that did best on some load of earlier sweeps, or may."""


def rivals(name: SetName) -> list[Cell]:
    return [
        Cell(
            name=f"rivals {title}",
            group="rivals",
            case=title,
            profile=H100,
            online=parts[name],
            offline=offline,
            warm_up_s=30.0,
            context_tokens=context,
            limit_tokens=CLIENT_LIMIT_TOKENS,
            drain_s=1.0 + CLIENT_LIMIT_TOKENS * 0.05,
            seed=_own_seed(name),
        )
        for title, (parts, offline, context) in RIVAL_LOADS.items()
    ]


# ---- cost models that are wrong ----

WRONG_FACTORS = (0.7, 1.3)
WRONG_NOISE = 0.15
STALL_STEPS = 300


def wrong(name: SetName) -> list[Cell]:
    """Loads of other groups, on devices that are slower or faster than their profile, with noise and stalls."""
    code_s = (260.0, 345.0) if name == CALIBRATION else (1280.0, 1375.0)
    conv_s = (200.0, 320.0) if name == CALIBRATION else (900.0, 1020.0)
    (seed,) = seeds_of(name, 1)
    loads = {
        "code A100": Cell(
            name="", group="", profile=A100, online=(Part("azure_code_2023", code_s, 0.7),), context_tokens=32_768
        ),
        "chats H100 beside": Cell(
            name="",
            group="",
            profile=H100,
            online=(Part("azure_conv_2023", conv_s, 1.2),),
            offline=FLOOD,
            warm_up_s=WARM_UP_S,
            context_tokens=32_768,
        ),
        "live 0.2": _w5(LIVE_PROFILE, 0.2, seed, W5_TPOT_SLO_S[LIVE_PROFILE][0.2]),
        "overload 2000/150 0.8x beside": _overload((2000, 150), 0.8, seed, is_beside=True),
        "overload 2000/150 1.5x alone": _overload((2000, 150), 1.5, seed, is_beside=False),
    }
    return [
        msgspec.structs.replace(
            cell,
            name=f"wrong x{factor:g} {title}",
            group="wrong",
            case=title,
            noise=WRONG_NOISE,
            truth=factor,
            stall_steps=STALL_STEPS,
            seed=seed,
        )
        for (title, cell), factor in product(loads.items(), WRONG_FACTORS)
    ]


def constant(name: SetName) -> list[Cell]:
    return design.cells(is_report=name == REPORT)


# ---- figures of docs and prototypes, to see that the harness measures what they did ----


def known(name: SetName) -> list[Cell]:
    if name == REPORT:
        return []
    code, conv, synthetic = "azure_code_2023", "azure_conv_2023", "mooncake_synthetic"
    loads = [
        ("code A100", A100, Part(code, (0.0, 300.0), 0.5), 1, ""),
        ("code 5 A100", A100, Part(code, (0.0, 300.0), 2.5), 5, ""),
        ("code H100", H100, Part(code, (600.0, 900.0), 1.0), 1, ""),
        ("mooncake_synthetic H100 beside", H100, Part(synthetic, (0.0, 200.0), 1.0), 1, FLOOD),
        ("conv H100 beside", H100, Part(conv, (107.0, 307.0), 1.3), 1, FLOOD),
    ]
    return [
        Cell(
            name=f"known {title}",
            group="known",
            case=title,
            profile=profile,
            online=(part,),
            offline=offline,
            replicas=replicas,
            noise=0.0,
            seed=11,
        )
        for title, profile, part, replicas, offline in loads
    ]


# ---- more streams than memory ----

MEMORY_LOADS = {"fixed-100-1000": (25.0, 20.0), "made-reasoning": (8.0, 75.0)}
"""Requests per second and seconds of arrivals; to be run with 512 seats (``neaptide@2048x512``)."""


def memory(name: SetName) -> list[Cell]:
    """Long answers that all fit at their beginning, and together need up to three times the memory."""
    return [
        Cell(
            name=f"memory {source} seed {seed}",
            group="memory",
            case=source,
            profile=A100,
            online=(Part(source, (0.0, length_s), rate_rps=rate_rps),),
            ttft_slo_s=2.0,
            tpot_slo_s=0.1,
            context_tokens=16_384,
            limit_tokens=4096,
            seed=seed,
        )
        for (source, (rate_rps, length_s)), seed in product(MEMORY_LOADS.items(), seeds_of(name, 2))
    ]


GROUPS: dict[str, Callable[[SetName], list[Cell]]] = {
    "constant": constant,
    "w5": w5,
    "overload": overload,
    "bros": bros,
    "echo": echo,
    "long": long,
    "rivals": rivals,
    "wrong": wrong,
    "known": known,
    "memory": memory,
}


def cells_of(name: SetName) -> list[Cell]:
    """Every cell of a set."""
    return [cell for group in GROUPS.values() for cell in group(name)]


QUICK = (
    "known code A100",
    "known conv H100",
    "constant azure_code_2023 1 H100 1x",
    "constant made-code 1 A100 1.5x",
    "constant mooncake_synthetic 1 H100 0.8x",
    "constant made-bursts 1 H100 0.8x",
    f"w5 {LIVE_PROFILE} 0.1 seed 0",
    f"w5 {LIVE_PROFILE} 0.1 seed 1",
    f"w5 {LIVE_PROFILE} 0.4 seed 0",
    "overload 2000/150 0.8x beside seed 0",
    "overload 2000/150 1x beside seed 0",
    "bros OPT-13B ShareGPT 9/s",
)
"""Names, or their beginnings, of a dozen cells of the calibration that are short and unlike each other."""


def quick_cells() -> list[Cell]:
    return [cell for cell in cells_of(CALIBRATION) if cell.name.startswith(QUICK)]


def rivals_of(cell: Cell) -> list[str]:
    """Policies of other systems, and forms of ours, that the cell is also run under."""
    if cell.group == "bros":
        return ["fcfs", "fcfs-v0"]
    if cell.group == "echo" and cell.offline:
        return ["echo", "neaptide+plan"]
    if cell.group in ("rivals", "constant"):
        points = [f"priority@{point}" for point in RIVAL_POINTS] if cell.group == "rivals" else []
        return [*points, "neaptide_lab.policies.qoserve:QoServe", "neaptide_lab.policies.slidingserve:SlidingServe"]
    return []
