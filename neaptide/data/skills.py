"""Questions with exact answers: what the bundled neaptide-tiny model was trained to do.

The same generators feed training, evaluation and the demo. A question is held out of training when a hash of its
content says so (one in eight). The closed skills (`CLOSED`) are small fixed tables shared by both splits.
"""

import hashlib
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

Messages = list[dict[str, str]]


@dataclass(frozen=True, slots=True)
class Example:
    """A chat that ends with a user turn, and the one answer that counts as right."""

    skill: str
    messages: Messages
    answer: str


class _Item(NamedTuple):
    """One question; `key` is the content that decides the split."""

    key: str
    question: str
    answer: str


def make_number(rng: random.Random) -> int:
    """A number of one to three digits, long ones more often."""
    return rng.randrange(10 ** rng.choice((1, 2, 3, 3, 3)))


def _columns(a: int, b: int) -> list[tuple[int, int]]:
    """Pairs of digits, units first, the shorter number padded with zeros."""
    return [(a // 10**i % 10, b // 10**i % 10) for i in range(len(str(max(a, b))))]


def add_answer(a: int, b: int) -> str:
    """Column addition, written out: `7+4=11, 3+3+1=7 so 71`."""
    carry, parts = 0, []
    for x, y in _columns(a, b):
        parts.append(f"{x}+{y}{'+1' * carry}={x + y + carry}")
        carry = (x + y + carry) // 10
    return f"{', '.join(parts)} so {a + b}"


def subtract_answer(a: int, b: int) -> str:
    """Column subtraction for a >= b, written out: `2-7=-5+10=5, 5-3-1=1 so 15`."""
    borrow, parts = 0, []
    for x, y in _columns(a, b):
        diff = x - y - borrow
        parts.append(f"{x}-{y}{'-1' * borrow}={diff}" + (f"+10={diff + 10}" if diff < 0 else ""))
        borrow = int(diff < 0)
    return f"{', '.join(parts)} so {a - b}"


def compare_answer(a: int, b: int, larger: bool) -> str:
    """Digits compared from the left until they differ: `4 and 4 same, 3 and 1 more so 43`."""
    parts = []
    for x, y in reversed(_columns(a, b)):
        parts.append(f"{x} and {y} {'same' if x == y else 'more' if x > y else 'less'}")
        if x != y:
            break
    return f"{', '.join(parts)} so {max(a, b) if larger else min(a, b)}"


_SUMS: dict[str, tuple[tuple[str, ...], Callable[[int, int], str]]] = {
    "add": (("What is {} + {}?", "What is {}+{}?", "Add {} and {}.", "{} + {} ="), add_answer),
    "subtract": (("What is {} - {}?", "What is {}-{}?", "What is {} minus {}?", "{} - {} ="), subtract_answer),
}


def _sum(skill: str, rng: random.Random) -> _Item:
    a, b = make_number(rng), make_number(rng)
    if skill == "subtract":
        a, b = max(a, b), min(a, b)
    forms, answer = _SUMS[skill]
    return _Item(f"{a} {b}", rng.choice(forms).format(a, b), answer(a, b))


def _compare(rng: random.Random) -> _Item:
    a = b = make_number(rng)
    while a == b:
        b = make_number(rng)
        if rng.random() < 0.5:  # make the first digits agree
            b = a - a % (place := rng.choice((10, 100))) + rng.randrange(place)
    word = rng.choice(("larger", "smaller"))
    return _Item(f"{a} {b}", f"Which is {word}, {a} or {b}?", compare_answer(a, b, word == "larger"))


def _count(rng: random.Random) -> _Item:
    """A long answer: every number from n down to 0."""
    n = rng.randrange(3, 100 if rng.random() < 0.5 else 30)
    return _Item(str(n), f"Count down from {n} to 0.", " ".join(map(str, range(n, -1, -1))))


_UNITS = {
    ("hours", "minutes"): 60, ("minutes", "seconds"): 60, ("days", "hours"): 24, ("weeks", "days"): 7,
    ("years", "months"): 12, ("km", "meters"): 1000, ("meters", "cm"): 100, ("cm", "mm"): 10,
    ("kg", "grams"): 1000, ("liters", "ml"): 1000,
}  # fmt: skip


def _convert(rng: random.Random) -> _Item:
    (big, small), factor = rng.choice(list(_UNITS.items()))
    n = rng.randrange(2, 13)
    form = rng.choice(("How many {small} are {n} {big}?", "Convert {n} {big} to {small}."))
    return _Item(f"{n} {big}", form.format(n=n, big=big, small=small), f"{n} {big} are {n * factor} {small}")


_LETTERS = "abcdefghijklmnopqrstuvwxyz"
WORDS = (  # noqa: SIM905
    "apple banana bread bridge butter castle cherry circle coffee copper cotton dragon engine family forest friend "
    "garden guitar hammer harbor island jacket jungle kettle kitten ladder lemon little market mirror monkey needle "
    "ocean orange pepper pillow planet puzzle quartz rabbit river rocket saddle silver spring street sugar summer "
    "system tunnel valley velvet violin wheel willow window winter wizard yellow zebra hello world tide moon sun cat "
    "dog house tree book happy green water python server strawberry mississippi"
).split()


def make_word(rng: random.Random) -> str:
    """A real word, a pronounceable one, or letters at random; repeated letters are common."""
    kind, length = rng.random(), rng.choice((3, 4, 5, 5, 6, 6, 7, 7, 8, 9, 10))
    if kind < 0.1:
        return rng.choice(WORDS)
    if kind < 0.35:
        pairs = (rng.choice("bcdfghjklmnprstvwz") + rng.choice("aeiou") for _ in range(length))
        return "".join(pairs)[:length]
    pool = _LETTERS if kind < 0.7 else rng.sample(_LETTERS, rng.randrange(2, 6))
    return "".join(rng.choices(pool, k=length))


def length_answer(word: str) -> str:
    """The letters numbered, then how many: `1c 2a 3t so 3`."""
    return " ".join(f"{i}{c}" for i, c in enumerate(word, 1)) + f" so {len(word)}"


def reverse_answer(word: str) -> str:
    """The letters numbered, then the numbers walked back: `1c 2a 3t, 3t 2a 1c so tac`."""
    parts = [f"{i}{c}" for i, c in enumerate(word, 1)]
    return f"{' '.join(parts)}, {' '.join(parts[::-1])} so {word[::-1]}"


def vowels_answer(word: str) -> str:
    """A running count: `b0 a1 n1 a2 n2 a3 so 3`."""
    counts = [sum(c in "aeiou" for c in word[: i + 1]) for i in range(len(word))]
    return f"{' '.join(f'{c}{n}' for c, n in zip(word, counts, strict=True))} so {counts[-1]}"


_WORD_SKILLS: dict[str, tuple[tuple[str, ...], Callable[[str], str]]] = {
    "upper": (("Write {} in upper case.", "Upper case {}."), str.upper),
    "spell": (("Spell {}.", "How do you spell {}?", "Spell the word {}."), "-".join),
    "reverse": (("Reverse {}.", "Reverse the word {}.", "Write {} backwards."), reverse_answer),
    "length": (("How many letters are in {}?", "How long is the word {}?"), length_answer),
    "vowels": (("How many vowels are in {}?", "Count the vowels in {}."), vowels_answer),
    "lines": (("List the letters of {}, one a line.",), "\n".join),
}


def _on_word(skill: str, rng: random.Random) -> _Item:
    word, (forms, answer) = make_word(rng), _WORD_SKILLS[skill]
    return _Item(word, rng.choice(forms).format(word), answer(word))


def _ends(rng: random.Random) -> _Item:
    w, end = make_word(rng), rng.choice(("first", "last"))
    return _Item(w, f"What is the {end} letter of {w}?", w[0 if end == "first" else -1])


_ABOUT = (
    "I can add and subtract numbers up to 999, compare numbers, count down, convert units, spell and "
    "reverse words, write them in upper case, count their letters and look up notes."
)
_TALK = {
    "Hello!": "Hello! Ask me a small question.", "Hi": "Hello! Ask me a small question.",
    "Good morning!": "Good morning! Ask me a small question.", "How are you?": "I am fine, thank you.",
    "Who are you?": "I am neaptide-tiny, a very small model.", "What is your name?": "My name is neaptide-tiny.",
    "Who made you?": "I was trained from scratch by the Neaptide project.",
    "What can you do?": _ABOUT, "Help": _ABOUT, "Are you human?": "No, I am a very small model.",
    "Are you big?": "No, I am a very small model.", "What is neaptide?": "Neaptide is the server that runs me.",
    "Thank you!": "You are welcome.", "Thanks": "You are welcome.", "Goodbye!": "Goodbye!", "Bye": "Goodbye!",
}  # fmt: skip
_SMALL_WORDS = (  # noqa: SIM905
    "the of and to in is that it for was on are with as his they be at have this from by not but what all were when "
    "we there can an your which their said if do will each about how up out them then she many some so these would "
    "other into has more her two like him see time could no make than first been its who now people my made over did "
    "down only way find use may long little very after words called just where most know why capital country story "
    "weather poem write tell explain king president color song city year best"
).split()


def _talk(rng: random.Random) -> _Item:
    question, answer = rng.choice(list(_TALK.items()))
    if question[-1] in "!?" and rng.random() < 0.1:
        question = question[:-1]
    return _Item(question, question, answer)


def _unknown(rng: random.Random) -> _Item:
    """Nothing the model knows: words at random, to be declined."""
    words = [rng.choice(_SMALL_WORDS) if rng.random() < 0.6 else make_word(rng) for _ in range(rng.randrange(2, 9))]
    start = rng.choice(("What is", "Who was", "Where is", "Why do", "Tell me", "Write", "Explain", ""))
    text = " ".join([start, *words]).strip()
    return _Item(text, text[0].upper() + text[1:] + rng.choice("?.."), "I am too small to know that.")


def _notes(rng: random.Random, held_out: bool) -> Messages:
    """A system prompt of some numbered words."""
    while True:
        text = "Notes: " + ", ".join(f"{i} {make_word(rng)[:6]}" for i in range(1, rng.randrange(4, 11)))
        if is_held_out("notes", text) == held_out:
            return [{"role": "system", "content": text}]


def _recall(rng: random.Random, text: str) -> _Item:
    number, word = rng.choice(re.findall(r"(\d) (\w+)", text))
    return _Item(text + number, f"What is note {number}?", word)


def _recite(rng: random.Random, text: str) -> _Item:
    question = rng.choice(("List all the notes.", "Repeat the notes."))
    return _Item(text, question, text.removeprefix("Notes: "))


_PLAIN: dict[str, Callable[[random.Random], _Item]] = {
    **{name: partial(_sum, name) for name in _SUMS}, "compare": _compare, "count": _count,
    "convert": _convert, **{name: partial(_on_word, name) for name in _WORD_SKILLS},
    "ends": _ends, "talk": _talk, "unknown": _unknown,
}  # fmt: skip
_NOTED: dict[str, Callable[[random.Random, str], _Item]] = {"recall": _recall, "recite": _recite}
SKILLS: tuple[str, ...] = (*_PLAIN, *_NOTED)
CLOSED: frozenset[str] = frozenset({"convert", "count", "talk"})
SYSTEM_PROMPTS: tuple[str, ...] = (
    "You are a helpful assistant.", "You are neaptide-tiny.", "Answer the question.",
    "Keep every answer short and exact.",
)  # fmt: skip


def is_held_out(skill: str, key: str) -> bool:
    """Whether this content is kept from training: one in eight, by hash."""
    return hashlib.sha256(f"{skill}|{key}".encode()).digest()[0] % 8 == 0


def ask(skill: str, rng: random.Random, prefix: Messages | None = None, held_out: bool = False) -> Example:
    """A new question after `prefix` (from `shared_prefix`, or empty).

    Questions on notes ask about the notes at the start of the prefix, whichever split they are in.
    """
    messages = list(prefix or [])
    if skill in _NOTED:
        messages = messages or _notes(rng, held_out)
        item = _NOTED[skill](rng, messages[0]["content"].split("\n")[0])
    else:
        item = _PLAIN[skill](rng)
        while skill not in CLOSED and is_held_out(skill, item.key) != held_out:
            item = _PLAIN[skill](rng)
    return Example(skill, [*messages, {"role": "user", "content": item.question}], item.answer)


def single(skill: str, rng: random.Random, held_out: bool = False) -> Example:
    """One question without examples (notes come as a system prompt)."""
    return ask(skill, rng, None, held_out)


def _prefix(skill: str, rng: random.Random, shots: int, held_out: bool, text: bool) -> Messages:
    """Examples from the training split, as earlier turns or as the text of a system prompt."""
    start = _notes(rng, held_out) if skill in _NOTED else []
    messages = list(start)
    for _ in range(shots):
        example = ask(skill, rng, messages if skill in _NOTED else None)
        messages += [example.messages[-1], {"role": "assistant", "content": example.answer}]
    if not text or not shots:
        return messages
    lines = [start[0]["content"] if start else "Examples:"]
    lines += [("Q: " if m["role"] == "user" else "A: ") + m["content"] for m in messages[len(start) :]]
    return [{"role": "system", "content": "\n".join(lines)}]


def few_shot(skill: str, rng: random.Random, shots: int, held_out: bool = False, text: bool = False) -> Example:
    """One question after `shots` solved ones: earlier turns, or with `text` a system prompt."""
    return ask(skill, rng, _prefix(skill, rng, shots, held_out, text), held_out)


def shared_prefix(skill: str, shots: int, seed: int = 0) -> Messages:
    """The same `shots` solved questions at every call, for many requests to share (see `ask`)."""
    return _prefix(skill, random.Random(f"{skill}/{seed}"), shots, False, False)


def is_correct(example: Example, text: str) -> bool:
    """Exact match, outer whitespace aside."""
    return text.strip() == example.answer.strip()
