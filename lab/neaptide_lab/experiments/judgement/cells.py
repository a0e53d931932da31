"""The cells of every requirement, on calibration loads and on report loads.

Constants of a policy are chosen on the first and reported on the second: no seed and no window of a recorded trace is in
both.
"""

from collections.abc import Callable
from itertools import product
from typing import Literal

from neaptide_lab.experiments.judgement.cell import LIVE_PROFILE, Cell, Part

SetName = Literal["calibration", "report"]
CALIBRATION: SetName = "calibration"
REPORT: SetName = "report"
SETS: tuple[SetName, ...] = (CALIBRATION, REPORT)

A100, H100 = "a100-40g-llama-3.1-8b", "h100-80g-llama-3.1-8b"
FLOOD = "sharegpt_lengths"
CLIENT_LIMIT_TOKENS = 1024
FLOOD_WARM_UP_S = 20.0
NUM_SEEDS = 8


def seeds_of(name: SetName, count: int) -> range:
    first = 0 if name == CALIBRATION else 100
    return range(first, first + count)


# ---- the live measure ----

W5_CEILING_TOKENS_PER_S = {LIVE_PROFILE: 1304.6, "cpu-111m": 302.2}
W5_TPOT_SLO_S = {
    LIVE_PROFILE: {0.1: 0.02402, 0.2: 0.03026, 0.4: 0.04296},
    "cpu-111m": {0.1: 0.14867, 0.2: 0.17315, 0.4: 0.27544},
}
W5_LENGTHS = 128, 32


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
        online=(Part("fixed-128-32", (0.0, 300.0), rate_rps=rate_rps),),
        offline="fixed-256-64",
        ttft_slo_s=5.0 * tpot_slo_s,
        tpot_slo_s=tpot_slo_s,
        context_tokens=1024,
        window_s=(20.0, 290.0),
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
    (seed,) = seeds_of(name, 1)
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
            seed=seed,
            with_work=True,
        )
        for (model, (profile, context)), (lengths, source), rate_rps in product(
            BROS_MODELS.items(), BROS_LENGTHS.items(), BROS_RATES_RPS
        )
    ]


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


GROUPS: dict[str, Callable[[SetName], list[Cell]]] = {
    "w5": w5,
    "overload": overload,
    "bros": bros,
    "known": known,
}


def cells_of(name: SetName) -> list[Cell]:
    """Every cell of a set."""
    return [cell for group in GROUPS.values() for cell in group(name)]


QUICK = (
    "known code A100",
    "known code H100",
    "known conv H100",
    "known mooncake",
    f"w5 {LIVE_PROFILE} 0.1 seed 0",
    f"w5 {LIVE_PROFILE} 0.1 seed 1",
    f"w5 {LIVE_PROFILE} 0.2 seed 0",
    f"w5 {LIVE_PROFILE} 0.4 seed 0",
    "overload 2000/150 0.8x beside seed 0",
    "overload 2000/150 1x beside seed 0",
    "bros OPT-13B ShareGPT 9/s",
    "bros OPT-30B ShareGPT 9/s",
)


def quick_cells(name: SetName) -> list[Cell]:
    return [cell for cell in cells_of(name) if any(text in cell.name for text in QUICK)]


def rivals_of(cell: Cell) -> list[str]:
    """Policies of other systems that the cell is also run under."""
    return {"bros": ["fcfs", "fcfs-v0", "bros"]}.get(cell.group, [])
