"""The metrics of the scheduler, and how they travel from the engine process to ``/metrics``.

vLLM sends its ``SchedulerStats`` from the engine to an API process with every step. Of its fields only a dictionary of
counts takes names that vLLM does not know: each of our values goes there as a whole number, and is taken out before
vLLM's own loggers print the dictionary. Counters travel as increases, so each API process may get some of them.
"""

from collections import Counter
from typing import NamedTuple

CARRIER = "num_kv_fetch_reqs_by_stage"
"""Field of vLLM's statistics in which the series travel from the engine's process to the API process. 0.31 lacks it."""
PREFIX = "neaptide/"
"""Beginning of our names in the dictionary of a step's statistics."""
PLUGIN = "neaptide_batches"
"""Name of our plug-ins in vLLM's allow-list ``VLLM_PLUGINS``."""


class Series(NamedTuple):
    """A series of a metric. A value is sent in units of ``scale``."""

    metric: str
    help: str
    labels: tuple[tuple[str, str], ...] = ()
    is_counter: bool = True
    scale: float = 1.0


_STEP = "neaptide_step_seconds", "Predicted seconds of steps, by the work that makes them longer."
_TOKENS = "neaptide_tokens", "Tokens computed, prompts and output."
_FIRST = "neaptide_first_tokens", "First tokens of chats, by whether they met the TTFT target."
_ANSWERS = "neaptide_answers", "Ended answers of chats, by whether they met the TPOT target."
_TARGET = "neaptide_target_seconds", "Default target of chats that name none."
_WAITING = "neaptide_waiting_requests", "Requests that wait."

SERIES: dict[str, Series] = {
    "streams_s": Series(*_STEP, (("work", "streams"),), scale=1e-6),
    "prompts_s": Series(*_STEP, (("work", "prompts"),), scale=1e-6),
    "offline_s": Series(*_STEP, (("work", "offline"),), scale=1e-6),
    "steps": Series("neaptide_steps", "Steps with work."),
    "online_tokens": Series(*_TOKENS, (("class", "online"),)),
    "offline_tokens": Series(*_TOKENS, (("class", "offline"),)),
    "first_in_time": Series(*_FIRST, (("in_time", "true"),)),
    "first_late": Series(*_FIRST, (("in_time", "false"),)),
    "answers_in_time": Series(*_ANSWERS, (("in_time", "true"),)),
    "answers_late": Series(*_ANSWERS, (("in_time", "false"),)),
    "preempted": Series("neaptide_preemptions_for_chats", "Offline requests preempted because a chat waited."),
    "planning_s": Series("neaptide_planning_seconds", "Time of our planning, vLLM's own apart.", scale=1e-6),
    "ttft_s": Series(*_TARGET, (("target", "ttft"),), is_counter=False, scale=1e-6),
    "tpot_s": Series(*_TARGET, (("target", "tpot"),), is_counter=False, scale=1e-6),
    "waiting_online": Series(*_WAITING, (("class", "online"),), is_counter=False),
    "waiting_offline": Series(*_WAITING, (("class", "offline"),), is_counter=False),
    "cost_error": Series(
        "neaptide_cost_model_error_ratio", "Mean error of predicted step times.", is_counter=False, scale=1e-6
    ),
    "active": Series(
        "neaptide_scheduler_active", "1 if Neaptide's scheduler decides, 0 if vLLM's own does.", is_counter=False
    ),
}


class Given:
    """What the scheduler gave to whom, since the last sending and since the last log line."""

    def __init__(self) -> None:
        self.recent: Counter[str] = Counter()
        """Counts since the last log line, in the series' units."""
        self._unsent: Counter[str] = Counter()

    def add(self, name: str, value: float = 1.0) -> None:
        """Adds to a counter."""
        units = round(value / SERIES[name].scale)
        self.recent[name] += units
        self._unsent[name] += units

    def take(self, gauges: dict[str, float]) -> dict[str, int]:
        """Entries to send: the increases since the last time, and these gauges."""
        sent = {PREFIX + name: units for name, units in self._unsent.items() if units}
        self._unsent.clear()
        return sent | {PREFIX + name: round(value / SERIES[name].scale) for name, value in gauges.items()}

    def line(self, seconds: float, gauges: dict[str, float]) -> str:
        """A log line about the last ``seconds``; the counts begin anew."""
        recent = {name: units * SERIES[name].scale for name, units in self.recent.items()}
        self.recent.clear()

        def of(name: str) -> float:
            return recent.get(name, 0.0)

        busy_s = max(of("streams_s") + of("prompts_s") + of("offline_s"), 1e-9)
        ttft_ms, tpot_ms = 1e3 * gauges["ttft_s"], 1e3 * gauges["tpot_s"]
        firsts, answers = of("first_in_time") + of("first_late"), of("answers_in_time") + of("answers_late")
        return (
            f"neaptide, last {seconds:.0f} s: of the step time {of('streams_s') / busy_s:.0%} to chats' streams, "
            f"{of('prompts_s') / busy_s:.0%} to their prompts, {of('offline_s') / busy_s:.0%} to offline work; "
            f"{of('online_tokens'):,.0f} online and {of('offline_tokens'):,.0f} offline tokens; "
            f"{of('first_in_time'):.0f} of {firsts:.0f} first tokens and {of('answers_in_time'):.0f} of "
            f"{answers:.0f} answers in time (TTFT {ttft_ms:.0f} ms, TPOT {tpot_ms:.0f} ms "
            f"unless asked otherwise); {of('preempted'):.0f} offline requests preempted for chats; "
            f"waiting: {gauges['waiting_online']:.0f} online, {gauges['waiting_offline']:.0f} offline; step times "
            f"{gauges['cost_error']:.0%} off; planning {1e3 * of('planning_s') / max(of('steps'), 1.0):.2f} ms a step"
        )
