"""Calls of functions, sentences on their results, and answers in JSON: what the bundled model was taught later.

Calls are in the format of Hermes, and the functions on offer stand in the first system turn, as the model's chat
template writes them. ``ask``, ``single`` and ``few_shot`` know every skill, those of ``skills`` included.
"""

import json
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from neaptide.data import skills
from neaptide.data.skills import Example, Messages, is_held_out, make_number, make_word


@dataclass(frozen=True, slots=True)
class SkillTool:
    """A function, and questions that only it can answer."""

    name: str
    types: Mapping[str, str]
    """JSON types of its parameters, by name."""
    questions: tuple[str, ...]

    def definition(self) -> dict[str, Any]:
        """As requests offer it."""
        schema = {
            "type": "object",
            "properties": {name: {"type": kind} for name, kind in self.types.items()},
            "required": [*self.types],
            "additionalProperties": False,
        }
        return {"type": "function", "function": {"name": self.name, "parameters": schema}}

    def arguments(self, rng: random.Random) -> dict[str, Any]:
        """Some that are valid."""
        return {name: make_word(rng) if kind == "string" else make_number(rng) for name, kind in self.types.items()}


TOOLS: dict[str, SkillTool] = {
    tool.name: tool
    for tool in (
        SkillTool(
            "get_weather", {"city": "string"}, ("What is the weather in {city}?", "How is the weather in {city}?")
        ),
        SkillTool("get_time", {"city": "string"}, ("What time is it in {city}?", "What is the time in {city}?")),
        SkillTool("multiply", {"a": "integer", "b": "integer"}, ("What is {a} * {b}?", "Multiply {a} by {b}.")),
        SkillTool("set_timer", {"minutes": "integer"}, ("Set a timer for {minutes} minutes.",)),
        SkillTool("send_message", {"to": "string", "text": "string"}, ("Send {to} the message {text}.",)),
    )
}
TOOL_SKILLS: tuple[str, ...] = ("call", "result")
"""Their chats begin with the functions on offer."""
STRUCTURED: tuple[str, ...] = (*TOOL_SKILLS, "untooled", "json")
ALL: tuple[str, ...] = (*skills.SKILLS, *STRUCTURED)
IN_JSON: tuple[str, ...] = ("add", "subtract", "compare", "length", "vowels", "spell", "ends")
"""Skills whose answers are asked for in JSON, too."""
JSON_REQUEST = " Answer in JSON."
_MAX_OFFERED = 4
_DECLINED = "I am too small to know that."


def offer_text(functions: Mapping[str, Sequence[str]]) -> str:
    """The system turn that offers functions, given as names and names of parameters."""
    return "\n".join(["Tools:", *(f"{name}({', '.join(parameters)})" for name, parameters in functions.items())])


def call_text(name: str, arguments: Mapping[str, Any]) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def offered(messages: Messages) -> list[SkillTool]:
    """Functions that the first turn offers; other people's have no questions, and texts as arguments."""
    first = messages[0]["content"] if messages and messages[0]["role"] == "system" else ""
    found = re.findall(r"^(\w+)\((.*)\)$", first, re.MULTILINE)
    return [
        TOOLS.get(name) or SkillTool(name, dict.fromkeys(filter(None, names.split(", ")), "string"), ())
        for name, names in found
    ]


def other_function(rng: random.Random) -> dict[str, list[str]]:
    """One that no question needs."""
    return {make_word(rng)[:7]: sorted({make_word(rng)[:4] for _ in range(rng.randrange(3))})}


def offer(rng: random.Random) -> Messages:
    """One to four functions in any order, ours among them."""
    ours = rng.sample([*TOOLS.values()], rng.randrange(1, _MAX_OFFERED))
    functions: dict[str, Sequence[str]] = {tool.name: [*tool.types] for tool in ours}
    if rng.random() < 0.3:
        functions |= other_function(rng)
    order = rng.sample([*functions], len(functions))
    return [{"role": "system", "content": offer_text({name: functions[name] for name in order})}]


def _question(skill: str, tools: Sequence[SkillTool], rng: random.Random, held_out: bool) -> tuple[str, str]:
    """A question for one of the functions, and the call that answers it."""
    while True:
        tool = rng.choice([tool for tool in tools if tool.questions])
        arguments = tool.arguments(rng)
        if is_held_out(skill, " ".join(map(str, arguments.values()))) == held_out:
            return rng.choice(tool.questions).format(**arguments), call_text(tool.name, arguments)


def _call(rng: random.Random, prefix: Messages, held_out: bool) -> Example:
    question, call = _question("call", offered(prefix), rng, held_out)
    return Example("call", [*prefix, {"role": "user", "content": question}], call)


def _result(rng: random.Random, prefix: Messages, held_out: bool) -> Example:
    """The function was called and has answered: a word or a number, which the model passes on."""
    question, call = _question("result", offered(prefix), rng, held_out)
    value = make_word(rng) if rng.random() < 0.5 else str(make_number(rng))
    turns = [("user", question), ("assistant", call), ("tool", value)]
    messages = [{"role": role, "content": content} for role, content in turns]
    return Example("result", [*prefix, *messages], f"The answer is {value}.")


def _untooled(rng: random.Random, prefix: Messages, held_out: bool) -> Example:
    """The same questions where nothing is on offer."""
    question, _ = _question("untooled", [*TOOLS.values()], rng, held_out)
    return Example("untooled", [*prefix, {"role": "user", "content": question}], _DECLINED)


def json_answer(answer: str) -> str:
    """An answer of another skill as an object: its working, if it has any, and what came of it."""
    working, _, last = answer.rpartition(" so ")
    value = {"answer": int(last) if last.isdecimal() else last}
    return json.dumps({"working": working} | value if working else value)


def json_schema(answer: str) -> dict[str, Any]:
    """A schema that asks for an object with the members of this one."""
    kinds = {name: "integer" if isinstance(value, int) else "string" for name, value in json.loads(answer).items()}
    properties = {name: {"type": kind} for name, kind in kinds.items()}
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


def _json(rng: random.Random, prefix: Messages, held_out: bool) -> Example:
    """Held out is what the skill itself holds out."""
    plain = skills.single(rng.choice(IN_JSON), rng, held_out)
    question = plain.messages[-1]["content"] + JSON_REQUEST
    return Example("json", [*prefix, {"role": "user", "content": question}], json_answer(plain.answer))


_ASK = {"call": _call, "result": _result, "untooled": _untooled, "json": _json}


def ask(skill: str, rng: random.Random, prefix: Messages | None = None, held_out: bool = False) -> Example:
    """As ``skills.ask``, for every skill; calls are of functions that the prefix offers."""
    if skill not in _ASK:
        return skills.ask(skill, rng, prefix, held_out)
    if skill in TOOL_SKILLS and not prefix:
        prefix = offer(rng)
    return _ASK[skill](rng, prefix or [], held_out)


def single(skill: str, rng: random.Random, held_out: bool = False) -> Example:
    """One question without examples."""
    return ask(skill, rng, None, held_out)


def few_shot(skill: str, rng: random.Random, shots: int, held_out: bool = False, text: bool = False) -> Example:
    """As ``skills.few_shot``, for every skill; those of this module have examples as earlier turns only."""
    if skill not in _ASK:
        return skills.few_shot(skill, rng, shots, held_out, text)
    start = offer(rng) if skill in TOOL_SKILLS else []
    examples = [ask(skill, rng, start) for _ in range(shots)]
    messages = [*start]
    for example in examples:
        messages += [*example.messages[len(start) :], {"role": "assistant", "content": example.answer}]
    return ask(skill, rng, messages, held_out)
