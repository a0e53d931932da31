"""Cells of the gym: the seven loads of ``tuned-rivals`` on three devices with three seeds.

The cells of the first device and seed are the judgement's report cells, and those are the loads of ``tuned-rivals``. So
what a policy does there is what those experiments say. Another seed takes other windows of the recorded traces, and
none on which our constants were chosen. Another device takes the loads at a fraction of their rate.
"""

import msgspec

from neaptide_lab.experiments.judgement.cell import Cell, Part
from neaptide_lab.experiments.judgement.cells import REPORT, RIVAL_LOADS, rivals
from neaptide_lab.experiments.judgement.design import A100, H100

BIG = "a100-80g-qwen2.5-72b-tp8"
RATES = {H100: 1.0, A100: 0.32, BIG: 0.28}
"""Devices, with the share of the first one's requests per second that each gets: about what its compute allows."""
DEVICES = {"H100": H100, "A100": A100, "72B": BIG}
SEEDS = (0, 2, 3)
"""Without the seed of the calibration loads."""
STARTS_S = {
    "azure_conv_2023": (600.0, 300.0, 900.0),
    "azure_code_2023": (1133.0, 450.0, 750.0),
    "mooncake_conversation": (600.0, 800.0, 1500.0),
    "servegen_r1_resampled": (600.0, 1500.0, 2400.0),
}
"""Begin of each seed's window of a recorded trace, in its own seconds."""
LOADS = tuple(RIVAL_LOADS)
QUICK_SHARE = 0.1
"""Part of a window, and of the warm-up, that the quick form takes."""
QUICK_WARM_UP_S = 5.0


def cells(*, quick: bool = False) -> list[Cell]:
    """Every cell, those first that are cells of the experiments. The quick form has seven short ones."""
    firsts = rivals(REPORT)
    if quick:
        return [_shortened(cell) for cell in firsts]
    return [_of(cell, device, seed) for device in DEVICES for seed in SEEDS for cell in firsts]


def device_of(cell: Cell) -> str:
    """The short name of a cell's device."""
    return next(name for name, profile in DEVICES.items() if profile == cell.profile)


def _of(cell: Cell, device: str, seed: int) -> Cell:
    profile = DEVICES[device]
    if profile == cell.profile and seed == cell.seed:
        return cell
    parts = tuple(_part(part, RATES[profile], seed) for part in cell.online)
    name = f"gym {cell.case} {device} seed {seed}"
    return msgspec.structs.replace(cell, name=name, group="gym", profile=profile, online=parts, seed=seed)


def _part(part: Part, rate: float, seed: int) -> Part:
    """The part with another seed's window, at a share of its requests per second in as much time."""
    name, is_made, made_rps = part.source.partition("@")
    if is_made:
        return msgspec.structs.replace(part, source=f"{name}@{float(made_rps) * rate:g}")
    start_s = STARTS_S[name][SEEDS.index(seed)]
    length_s = rate * (part.window_s[1] - part.window_s[0])
    return msgspec.structs.replace(part, window_s=(start_s, start_s + length_s), speed=part.speed * rate)


def _shortened(cell: Cell) -> Cell:
    parts = tuple(_short_part(part) for part in cell.online)
    return msgspec.structs.replace(
        cell, name=f"gym {cell.case} quick", group="gym quick", online=parts, warm_up_s=QUICK_WARM_UP_S
    )


def _short_part(part: Part) -> Part:
    """The first tenth of a window. Of a made day, all of its hours in a tenth of the time, or the moment of a burst."""
    (from_s, to_s), (name, is_made, made_rps) = part.window_s, part.source.partition("@")
    length_s, middle_s = to_s - from_s, (from_s + to_s) / 2
    if not is_made:
        return msgspec.structs.replace(part, window_s=(from_s, from_s + QUICK_SHARE * length_s))
    if part.speed == 1.0:
        half_s = QUICK_SHARE * length_s / 2
        return msgspec.structs.replace(part, window_s=(middle_s - half_s, middle_s + half_s))
    rate_rps = float(made_rps) * QUICK_SHARE
    return msgspec.structs.replace(part, source=f"{name}@{rate_rps:g}", speed=part.speed / QUICK_SHARE)
