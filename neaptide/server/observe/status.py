"""Verdict on a server, in one sentence with its cause: a pure function of figures.

The first thing that is wrong is told, in the order of what costs users most: no engine, no storage, errors, late
chats, refusals, batches. ``docs/operations.md`` says what to do about each.
"""

from dataclasses import dataclass, field
from enum import StrEnum

LEAST_JUDGED = 10
"""Fewest choices over which a share of targets met is told."""
LEAST_MISSED = 5
MISSED_SHARE = 0.05
ERROR_SHARE = 0.05
LEAST_ERRORS = 5
SILENT_S = 5.0
"""An engine reports after each step, and twice a second when idle."""
LATE_FACTOR = 2.0
"""A chat that has waited for this many TTFT targets shows a backlog before it has a first token."""
LEAST_STEPS = 20
"""Fewest steps over which the machine's speed is told."""
SLOW_SPEED = 0.8
FULL_SHARE = 0.95
"""Share of the KV blocks above which memory is what chats wait for."""
BUSY_SHARE = 0.8
"""Share of the time in steps above which a machine has no time left."""
AWAY_FACTOR = 3.0
"""Time without an engine explains a share of late chats up to this many times its own: some queue before and after."""
NOW, LATELY = "the last minute", "the last 5 minutes"
"""Names of the windows of ``Figures.now`` and ``Figures.lately``."""
IDLE_OFFLINE_SHARE = 0.02
"""Share of computed tokens below which chats have the machine for themselves."""


class Severity(StrEnum):
    OK = "ok"
    INFO = "info"
    """Nothing to do: idle, starting, or as the operator wants it."""
    WARN = "warn"
    BAD = "bad"
    """Users notice it now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recent:
    """Figures of one time window. Latencies are in seconds; None is unknown."""

    seconds: float = 0.0
    judged: int = 0
    """Choices of online requests that ended."""
    ttft_missed: int = 0
    tpot_missed: int = 0
    missed: int = 0
    """Those that missed either target."""
    ttft_p50_s: float | None = None
    ttft_p99_s: float | None = None
    tpot_p50_s: float | None = None
    tpot_p99_s: float | None = None
    answers: int = 0
    """Ended requests without those that clients gave up."""
    errors: int = 0
    refused: int = 0
    error_codes: tuple[str, ...] = ()
    """Codes of errors and refusals, the most frequent first."""
    online_tokens: int = 0
    offline_tokens: int = 0
    steps: int = 0
    step_s: float = 0.0
    """Sum of measured step times, of those steps whose time was predicted."""
    predicted_s: float = 0.0
    away_s: float = 0.0
    """Time without an engine."""

    @property
    def speed(self) -> float | None:
        """Predicted over measured step time: 1 for the machine as it was calibrated."""
        return self.predicted_s / self.step_s if self.steps >= LEAST_STEPS and self.step_s > 0 else None

    @property
    def busy_share(self) -> float:
        """Share of the time that steps took."""
        return min(1.0, self.step_s / self.seconds) if self.seconds > 0 else 0.0

    @property
    def mean_step_s(self) -> float | None:
        return self.step_s / self.steps if self.steps >= LEAST_STEPS else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Everything that the status depends on."""

    is_up: bool = True
    has_started: bool = True
    """Whether an engine has been ready since the server started."""
    has_given_up: bool = False
    engine_age_s: float = 0.0
    """Time since the engine last reported, started or ended."""
    last_end: str = ""
    """How the last engine ended."""
    back_s: float = 0.0
    """Time since there was no engine last; 0 if there always was one."""
    is_draining: bool = False
    is_paused: bool = False
    storage_failing: bool = False
    ttft_slo_s: float = 1.0
    tpot_slo_s: float = 0.05
    oldest_silent_s: float = 0.0
    """Age of the oldest online request without a token."""
    silent: int = 0
    """Number of online requests without a token."""
    running_online: int = 0
    running_offline: int = 0
    waiting_online: int = 0
    blocks_total: int = 0
    blocks_online: int = 0
    pending_lines: int = 0
    """Lines of live batches that can still run."""
    waiting_batches: int = 0
    """Batches for which this server lacks the model or the context."""
    infeasible: int = 0
    at_risk: int = 0
    now: Recent = field(default_factory=Recent)
    """The last minute."""
    lately: Recent = field(default_factory=Recent)
    """The last five minutes."""


@dataclass(frozen=True, slots=True)
class Status:
    severity: Severity
    sentence: str
    cause: str = ""
    """Why, in a sentence; empty if it is not known or nothing is wrong."""


def status(figures: Figures) -> Status:
    """The one thing to know now."""
    for judge in (_engine, _storage, _errors, _late, _refusals, _slow, _batches):
        if (found := judge(figures)) is not None:
            return found
    return _fine(figures)


def standstill(figures: Figures) -> str:
    """Why batch lines wait and none is worked on; empty if they are worked on, or there is none."""
    if not figures.pending_lines or figures.lately.offline_tokens or figures.running_offline:
        return ""
    if not figures.is_up:
        return "there is no engine"
    if figures.is_paused:
        return "the operator has paused offline work"
    if figures.storage_failing:
        return "batch data cannot be stored"
    if figures.waiting_batches:
        return "no server has the model, or the context, that the batches need"
    if figures.blocks_total and figures.blocks_online >= FULL_SHARE * figures.blocks_total:
        return "chats hold the whole KV memory"
    if figures.lately.online_tokens:
        return "chats use the whole machine"
    return "they are being checked, or have just begun"


def _engine(f: Figures) -> Status | None:
    if f.is_draining:
        return Status(Severity.WARN, "The server stops. New work is refused; replies that have begun may finish.")
    cause = _sentence(f"it ended: {f.last_end}") if f.last_end else ""
    if f.has_given_up:
        sentence = f"There has been no engine for {duration(f.engine_age_s)}: five in a row did not start."
        return Status(Severity.BAD, sentence, cause or "The log says why.")
    if not f.is_up and not f.has_started:
        sentence = f"The model has been loading for {duration(f.engine_age_s)}. Requests get 503 until it is ready."
        return Status(Severity.INFO, sentence)
    if not f.is_up:
        sentence = f"The engine has been down for {duration(f.engine_age_s)}. New chats get 503 until it has restarted."
        return Status(Severity.BAD, sentence, cause)
    if f.engine_age_s > SILENT_S:
        sentence = f"The engine has not reported for {duration(f.engine_age_s)}."
        return Status(Severity.WARN, sentence, "A step takes long, or the engine hangs; then it is replaced.")
    return None


def _storage(f: Figures) -> Status | None:
    if not f.storage_failing:
        return None
    cause = "The disk or the database is full, broken or away; the log says which."
    return Status(Severity.BAD, "Files and batches cannot be stored. Chats go on.", cause)


def _errors(f: Figures) -> Status | None:
    lately = f.lately
    if lately.errors < LEAST_ERRORS or lately.errors <= ERROR_SHARE * lately.answers:
        return None
    sentence = f"{percent(lately.errors, lately.answers)} of the answers in 5 minutes are errors of the server."
    code = _code(lately)
    if code == "engine_unavailable" and f.last_end:
        return Status(Severity.BAD, sentence, _sentence(f"an engine ended: {f.last_end}"))
    return Status(Severity.BAD, sentence, f"Most have the code {code}." if code else "")


def _late(f: Figures) -> Status | None:
    is_now = f.now.judged >= LEAST_JUDGED
    window = f.now if is_now else f.lately
    if f.oldest_silent_s > LATE_FACTOR * f.ttft_slo_s:
        chats = f"{f.silent} chats wait for their first token" if f.silent > 1 else "A chat waits for its first token"
        sentence = f"{chats}, the oldest for {short(f.oldest_silent_s)}; the target is {short(f.ttft_slo_s)}."
        return Status(Severity.BAD, sentence, _cause(f, window, of_ttft=True))
    missed = {"TTFT": window.ttft_missed, "TPOT": window.tpot_missed}
    bad = [name for name, count in missed.items() if count >= LEAST_MISSED and count > MISSED_SHARE * window.judged]
    if not bad:
        return None
    most = max(bad, key=lambda one: missed[one])
    times = {"TTFT": (window.ttft_p99_s, f.ttft_slo_s), "TPOT": (window.tpot_p99_s, f.tpot_slo_s)}
    above = [(name, *times[name]) for name in bad]
    told = [f"{name} p99 {_beside(p99_s, slo_s)}" for name, p99_s, slo_s in above if p99_s and p99_s > slo_s]
    which = "their own targets" if not told and times[most][0] is not None else "their targets"
    # "Now" needs chats of the last minute that still run.
    verb = "Chats miss" if is_now and (f.silent or f.running_online) else "Chats missed"
    late = f"{percent(missed[most], window.judged)} of {window.judged} missed {most}"
    span = NOW if is_now else LATELY
    return Status(
        Severity.BAD if is_now or f.now.judged or f.silent else Severity.WARN,
        f"{verb} {which}{': ' if told else ''}{', '.join(told)}. {late} in {span}.",
        _cause(f, window, of_ttft=most == "TTFT"),
    )


def _cause(f: Figures, window: Recent, *, of_ttft: bool) -> str:
    explained = AWAY_FACTOR * window.away_s / max(window.seconds, window.away_s, 1.0) * window.judged
    if of_ttft and f.now.away_s > f.ttft_slo_s and window.ttft_missed <= explained:
        ended = f": {f.last_end}" if f.last_end else ""
        return f"There was no engine for {short(f.now.away_s)}, until {duration(f.back_s)} ago{ended}."
    if not of_ttft and window.steps >= LEAST_STEPS and window.predicted_s > window.steps * f.tpot_slo_s:
        step = short(window.predicted_s / window.steps)
        return f"A step of this load takes {step} even at the calibrated speed, more than the TPOT target."
    tokens = window.online_tokens + window.offline_tokens
    are_alone = tokens > 0 and window.offline_tokens <= IDLE_OFFLINE_SHARE * tokens
    if window.speed is not None and window.speed < SLOW_SPEED:
        sentence = f"The machine does {window.speed:.0%} of its calibrated speed; another process may use it."
        is_full = are_alone and window.busy_share >= BUSY_SHARE
        return f"{sentence} At this speed it is full of chats alone." if is_full else sentence
    if f.waiting_online and f.blocks_total and f.blocks_online >= FULL_SHARE * f.blocks_total:
        return (
            f"Chats hold {percent(f.blocks_online, f.blocks_total)} of the KV memory; {f.waiting_online} wait for it."
        )
    if not of_ttft and window.mean_step_s is not None and window.mean_step_s > f.tpot_slo_s:
        return f"A step takes {short(window.mean_step_s)} on average, more than the TPOT target."
    if are_alone and window.busy_share >= BUSY_SHARE:
        return "Chats alone are more than this machine can compute: add a replica, or send less."
    if are_alone:
        return f"Not known: the machine was busy for {window.busy_share:.0%} of the time. Chats may come in bursts."
    if tokens:
        return f"Not known. Batch work has {percent(window.offline_tokens, tokens)} of the tokens; pause it to compare."
    return ""


def _refusals(f: Figures) -> Status | None:
    if not f.now.refused:
        return None
    sentence = f"Requests are refused because the server is full: {f.now.refused} in the last minute."
    return Status(Severity.BAD, sentence, _cause(f, f.now, of_ttft=True))


def _slow(f: Figures) -> Status | None:
    speed = f.lately.speed
    if speed is None or speed >= SLOW_SPEED:
        return None
    sentence = f"The machine does {speed:.0%} of its calibrated speed."
    if f.lately.judged:
        sentence += f" {_met(f.lately, LATELY)}."
    return Status(Severity.WARN, sentence, "Perhaps another process uses it, or the profile is another machine's.")


def _batches(f: Figures) -> Status | None:
    if f.infeasible:
        sentence = f"{_batches_word(f.infeasible)} cannot end in the window, even with the whole machine."
        return Status(Severity.WARN, sentence, "Cancel batches that are due before, or give a longer window.")
    why = standstill(f)
    if why and not f.is_paused:
        return Status(Severity.WARN, f"Batch work stands still: {f.pending_lines} lines wait.", _sentence(why))
    if f.at_risk:
        sentence = f"{_batches_word(f.at_risk)} will not end in the window at the current rate."
        return Status(Severity.WARN, sentence, "Less online load would help.")
    if f.is_paused:
        return Status(Severity.INFO, "The operator has paused offline work.")
    return None


def _fine(f: Figures) -> Status:
    window, span = (f.now, NOW) if f.now.judged >= LEAST_JUDGED else (f.lately, LATELY)
    if window.judged and window.ttft_p99_s is not None:
        tpot = f", TPOT p99 {_beside(window.tpot_p99_s, f.tpot_slo_s)}" if window.tpot_p99_s else ""
        sentence = f"{_met(window, span)}: TTFT p99 {_beside(window.ttft_p99_s, f.ttft_slo_s)}{tpot}."
        return Status(Severity.OK, sentence)
    if f.lately.offline_tokens:
        return Status(Severity.OK, "Batch work runs. There were no chats in the last five minutes.")
    return Status(Severity.INFO, "Ready. There was no work in the last five minutes.")


def _met(window: Recent, span: str) -> str:
    """Share of chats that met their targets, as the start of a sentence."""
    if window.judged == 1 and not window.missed:
        return f"The only chat of {span} met both targets"
    share = f"{window.judged - window.missed} of {window.judged}" if window.missed else f"All {window.judged}"
    return f"{share} chats of {span} met both targets"


def _beside(seconds: float, target_s: float) -> str:
    """A latency and its target."""
    return f"{short(seconds)} (target {short(target_s)})"


def _code(window: Recent) -> str:
    return window.error_codes[0] if window.error_codes else ""


def _batches_word(count: int) -> str:
    return "A batch" if count == 1 else f"{count} batches"


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


# ---- texts ----


def percent(part: float, whole: float) -> str:
    """A share without a false 0% or 100%."""
    share = 100 * part / whole if whole else 0.0
    if 0 < share < 0.5 or 99.5 < share < 100:
        return f"{share:.1f}%"
    return f"{share:.0f}%"


def short(seconds: float) -> str:
    """A latency with two or three digits: 151 ms, 2.05 s, 16 s."""
    if seconds < 0.01:
        return f"{1000 * seconds:.1f} ms"
    if seconds < 0.9995:
        return f"{1000 * seconds:.0f} ms"
    return f"{seconds:.3g} s" if seconds < 10 else duration(seconds)


def duration(seconds: float) -> str:
    """A time span of seconds to days."""
    for length, unit in ((86_400, "days"), (3_600, "h"), (60, "min")):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"
