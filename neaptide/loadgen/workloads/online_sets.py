"""Synthetic online load: Poisson arrivals at a constant rate or along a daily curve, with drawn or bundled lengths."""

import itertools
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from neaptide.loadgen.workloads.lengths import lognormal_lengths
from neaptide.loadgen.workloads.traces import (
    TraceRequest,
    content_base,
    data_file,
    load_lengths,
    load_online,
    online_names,
    read_csv,
    select,
)

Rates = NDArray[np.float64]

BROS_TABLE_2 = {
    "bros-rt-sharegpt": ((222.76, 256.36), (234.51, 268.50)),
    "bros-rt-lmsys": ((90.50, 148.52), (237.04, 228.21)),
}
"""(mean, standard deviation) of input and output tokens."""
BROS_DURATION_S = 600.0
BROS_MAX_TOKENS = 1023
"""Limit for prompt and for output: BROS serves OPT models with a context of 2,048."""
DAY_S = 86_400
DAY_NAMES = ("echo-day", "servegen-day-large", "servegen-day-small")
CURVE_BIN_S = 60
RATE_WINDOW_S = 600


def generated_online_names() -> tuple[str, ...]:
    """The synthetic online sets that ``online_requests`` knows; ``@RATE`` may follow."""
    return (*BROS_TABLE_2, *DAY_NAMES)


def online_requests(
    spec: str | Path,
    seed: int = 0,
    *,
    window_s: tuple[float, float] | None = None,
    speed: float = 1.0,
    max_input_tokens: int | None = None,
) -> list[TraceRequest]:
    """Online requests sorted by arrival: of a recorded trace (``load_online``), or of a synthetic set by name.

    spec: ``NAME`` or ``NAME@RATE`` of ``generated_online_names()``, RATE in requests/s, by default 1 (the mean over the
    day for the daily curves); anything else is a recorded trace.
    seed: draws the synthetic sets, whose contents differ for each seed and each spec. A recorded trace does not depend
    on it.

    The other arguments are those of ``load_online``. Raises ValueError like that function, and for a rate that is not
    positive.
    """
    name, _, rate = str(spec).partition("@")
    if name not in generated_online_names():
        _check_recorded(spec, name)
        return load_online(spec, window_s=window_s, speed=speed, max_input_tokens=max_input_tokens)
    try:
        rate_rps = float(rate or 1.0)
    except ValueError:
        raise ValueError(f"{spec}: the rate is a number, in requests/s") from None
    if not 0 < rate_rps < math.inf:
        raise ValueError(f"{spec}: the rate must be positive")
    rng = np.random.default_rng([content_base(str(spec)) >> 31, seed])
    # Content ids of this spec and seed only: a server that has cached one rate must not find the next one there.
    ids = itertools.count(content_base(f"{spec} {seed}"))
    requests = _bros_rt(rng, ids, name, rate_rps) if name in BROS_TABLE_2 else _day(rng, ids, name, rate_rps)
    return select(requests, window_s=window_s, speed=speed, max_input_tokens=max_input_tokens)


def _check_recorded(spec: str | Path, name: str) -> None:
    """Raises ValueError, listing all names, if the spec is neither a recorded trace nor a path."""
    if str(spec) in online_names() or Path(spec).exists():
        return
    if name in online_names():
        raise ValueError(f"{spec}: a recorded trace has no rate; change its speed instead")
    synthetic = ", ".join(generated_online_names())
    raise ValueError(
        f"no trace {str(spec)!r}: neither a file nor one of {', '.join(online_names())}, nor synthetic: {synthetic} "
        "(NAME or NAME@RATE)"
    )


def poisson_arrivals(rng: np.random.Generator, rates_rps: Rates, bin_s: float) -> list[float]:
    """Sorted arrival times in seconds of a Poisson process whose rate is constant over each bin."""
    counts = rng.poisson(rates_rps * bin_s)
    starts = np.repeat(np.arange(len(counts)) * bin_s, counts)
    arrivals: list[float] = np.sort(starts + rng.random(len(starts)) * bin_s).tolist()
    return arrivals


def echo_day_curve(peak_to_trough: float = 4.0, burst: float = 2.0) -> Rates:
    """Relative request rate for each minute of a day, mean 1: Echo, section 2.2 and Figure 2.

    The rate is highest from 12:00 to 14:00 and lowest from 4:00 to 6:00, linear between. At 13:00 there are five
    minutes at ``burst`` times the peak. The paper's ratio of peak to trough is unknown: 4 is our assumption, as are the
    burst's size and length. The bundled rates of two production models have ratios of 1.5 and 2.4 between hours
    averaged over days.
    """
    hours = np.arange(DAY_S // CURVE_BIN_S) * CURVE_BIN_S / 3600
    evening = 1 + (peak_to_trough - 1) * 0.6
    curve = np.interp(
        hours, [0, 4, 6, 12, 14, 21, 24], [evening / 2, 1, 1, peak_to_trough, peak_to_trough, evening, evening / 2]
    )
    curve[(hours >= 13) & (hours < 13 + 5 / 60)] *= burst
    relative: Rates = curve / curve.mean()
    return relative


def servegen_day_curve(model: str) -> Rates:
    """Relative request rate for each 600 s of a day, mean 1: production rates averaged over the recorded days.

    model: ``large`` or ``small``.
    """
    rows = read_csv(data_file("online", f"servegen_rate_m_{model}.csv.gz"))
    rates = np.array([float(row["requests_per_s"]) for row in rows])
    days = rates.reshape(-1, DAY_S // RATE_WINDOW_S).mean(axis=0)
    relative: Rates = days / days.mean()
    return relative


def _bros_rt(rng: np.random.Generator, ids: Iterator[int], name: str, rate_rps: float) -> list[TraceRequest]:
    """Real-time load of BROS (section 7.1, Table 2): Poisson arrivals for 10 minutes, log-normal forced lengths."""
    arrivals = poisson_arrivals(rng, np.array([rate_rps]), BROS_DURATION_S)
    prompts, outputs = (
        lognormal_lengths(rng, len(arrivals), mean, std, high=BROS_MAX_TOKENS).tolist()
        for mean, std in BROS_TABLE_2[name]
    )
    return _unshared(ids, arrivals, prompts, outputs)


def _day(rng: np.random.Generator, ids: Iterator[int], name: str, rate_rps: float) -> list[TraceRequest]:
    """A day of chat: arrivals along a curve, lengths of the bundled ShareGPT rounds (as in Echo, section 7.1)."""
    model = name.removeprefix("servegen-day-")
    curve, bin_s = (echo_day_curve(), CURVE_BIN_S) if name == "echo-day" else (servegen_day_curve(model), RATE_WINDOW_S)
    arrivals = poisson_arrivals(rng, rate_rps * curve, bin_s)
    rounds = load_lengths(data_file("offline", "sharegpt_lengths.csv.gz"), 0)
    drawn = [rounds[k] for k in rng.integers(len(rounds), size=len(arrivals)).tolist()]
    return _unshared(ids, arrivals, [r.input_tokens for r in drawn], [r.output_tokens for r in drawn])


def _unshared(ids: Iterator[int], arrivals: list[float], prompts: list[int], outputs: list[int]) -> list[TraceRequest]:
    return [
        TraceRequest(arrival_s, ((next(ids), prompt),), output)
        for arrival_s, prompt, output in zip(arrivals, prompts, outputs, strict=True)
    ]
