"""API object of a quote."""

import math

from neaptide.server.openai.stored_replies import BatchQuote, QuotedWindow
from neaptide.server.quotes.desk import MadeQuote
from neaptide.server.quotes.quote import Quote, WindowQuote, arithmetic, outlook, until_end


def quote_object(made: MadeQuote) -> BatchQuote:
    found = made.found
    return {
        "object": "batch.quote",
        "created_at": int(made.at_s),
        "lines": found.size.num_lines,
        "input_tokens": found.size.prompt_tokens,
        "shared_tokens": found.size.prompt_tokens - found.size.new_tokens,
        "output_tokens": {"p50": found.answer_tokens[0], "p90": found.answer_tokens[1]},
        "device_seconds": {"p50": round(found.work_s[0], 1), "p90": round(found.work_s[1], 1)},
        "shared_device_seconds": round(found.shared_s, 1),
        "windows": [_window(made, window) for window in found.windows],
        "sentence": sentence(found),
        "basis": {
            "recorded_seconds": round(found.recorded_s, 1),
            "times_of_day": found.has_days,
            "saturated_seconds": round(found.efficiency.seconds, 1),
            "efficiency": round(found.efficiency.mean, 3),
            "chat_factor": round(found.efficiency.chat_factor, 3),
            "known_batches": found.num_known,
            "pool_seconds": round(found.pool_s, 1),
            "unchecked_batches": made.num_unchecked,
        },
    }


def _window(made: MadeQuote, window: WindowQuote) -> QuotedWindow:
    return {
        "completion_window": f"{window.window_s / 3600:g}h",
        "outlook": outlook(window),
        "p50_seconds": _known(window.p50_s),
        "p50_at": _time(made.at_s + window.p50_s),
        "p90_seconds": _known(window.p90_s),
        "p90_at": _time(made.at_s + window.p90_s),
        "other_batches_seconds": round(window.before_s, 1),
        "left_by_chats_seconds": round(window.left_s, 1),
        "reason": None if window.p90_s <= window.window_s else arithmetic(made.found, window),
    }


def _known(seconds: float) -> float | None:
    return None if math.isinf(seconds) else round(seconds, 1)


def _time(at_s: float) -> int | None:
    return None if math.isinf(at_s) else math.ceil(at_s)


def sentence(found: Quote) -> str:
    """The quote for people, for the longest window."""
    longest = found.windows[-1]
    if math.isinf(longest.p90_s):
        return f"It cannot be foreseen to be done within 2 days. {arithmetic(found, longest)}"
    return f"Done in {until_end(longest.p50_s)} in half of the cases, and in {until_end(longest.p90_s)} in nine of ten."
