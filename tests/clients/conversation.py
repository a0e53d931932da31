"""The conversation that every agents' SDK has with a scripted checkpoint: two questions, each with a call of a tool.

The script goes on only after a history as the template writes the SDK's messages: an SDK or a server that loses
something gets the first call again. The reasoning tells whether the SDK sent back the reasoning before it.
"""

from typing import Any

from tests.clients.scripts.recording import FIRST, SECOND, WEATHER

QUESTIONS = [FIRST, SECOND]
CITIES = [*WEATHER]
ANSWERS = ["Take an umbrella.", "Leave it at home."]
THOUGHTS = ["I need the weather.", "It rains.", "Another city.", "The sun shines."]
REMEMBERS = " I remember what I thought."
"""Ends each thought whose prompt has the one before it."""
_FIRST, _SECOND = (f"<|user|>{question}<|end|>" for question in QUESTIONS)


def _call(city: str) -> str:
    return f'<tool_call>\n{{"name": "get_weather", "arguments": {{"city": "{city}"}}}}\n</tool_call>'


def _said(after: str, thought: str, said: str) -> list[dict[str, str]]:
    """What the model says, with and without the reasoning of the message before it."""
    return [
        {"after": "<|assistant|>" + after, "say": f"{thought}\n</think>\n\n{said}"},
        {"after": "</think>" + after, "say": f"{thought}{REMEMBERS}\n</think>\n\n{said}"},
    ]


SCRIPT = [
    {"after": _FIRST, "say": f"{THOUGHTS[0]}\n</think>\n\nLet me see.{_call('Cologne')}"},
    *_said(f"Let me see.{_call('Cologne')}<|end|><|tool|>rain<|end|>", THOUGHTS[1], ANSWERS[0]),
    *_said(f"{ANSWERS[0]}<|end|>{_SECOND}", THOUGHTS[2], _call("Rome")),
    *_said(f"{_call('Rome')}<|end|><|tool|>sun<|end|>", THOUGHTS[3], ANSWERS[1]),
]


def seen(*, remembers: bool, shows_thoughts: bool = True) -> dict[str, Any]:
    """What an SDK sees of the conversation, and of a batch with its last request.

    Args:
        remembers: whether it sends reasoning back.
        shows_thoughts: whether it shows reasoning to its user.
    """
    end = REMEMBERS * remembers
    thoughts = [THOUGHTS[0], *(thought + end for thought in THOUGHTS[1:])]
    return {
        "answers": ANSWERS,
        "cities": CITIES,
        "thoughts": thoughts if shows_thoughts else [],
        "batch": [thoughts[-1], ANSWERS[-1]],
    }
