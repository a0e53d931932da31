"""Schemas and grammars that are made to be too much, one after another as fast as answers come.

``python -m lab.benchmarks.structured.attack URL hostile|plain|held``: a process of its own, at the lowest priority, for
attackers do not share the server's cores. Each line of its input is a duration in seconds: it attacks for so long, from
where it left off, and prints one JSON line: what each kind got, and its longest answer.
"""

import itertools
import json
import os
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

import httpx

CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "What is 21 + 34?"}]


def _nested(word: str, levels: int) -> dict[str, Any]:
    return {"guided_json": json.loads('{"items":' * levels + json.dumps({"const": word}) + "}" * levels)}


def _intersection(word: str) -> dict[str, Any]:
    parts = [f"/.*{letter}.{{{30 + index}}}/" for index, letter in enumerate("abcdefgh")]
    return {"guided_grammar": f'start: T "{word}"\nT: ' + " & ".join(parts)}


def _chained(word: str) -> dict[str, Any]:
    """Each level refers to the next one twice."""
    names = [f"#/$defs/{level}" for level in range(1, 61)]
    defs: dict[str, Any] = {str(level): {"anyOf": [{"$ref": name}] * 2} for level, name in enumerate(names)}
    return {"guided_json": {"$defs": defs | {"60": {"not": {"const": word}}}, "$ref": "#/$defs/0"}}


KINDS: dict[str, dict[str, Callable[[str], dict[str, Any]]]] = {
    "hostile": {
        "deep": lambda word: _nested(word, 80),
        "huge enumeration": lambda word: {"guided_json": {"enum": [f"{word} {i}" for i in range(20_000)]}},
        "1 MB grammar": lambda word: {"guided_grammar": "start: " + " | ".join([f'"{word}"'] * 100_000)},
        "1 MB schema": lambda word: {"guided_json": {"properties": {f"{word} {i}": {} for i in range(60_000)}}},
        "exploding intersection": _intersection,
        "chained references": _chained,
        "mail addresses": lambda word: {
            "guided_json": {"properties": {f"{word} {i}": {"format": "email"} for i in range(600)}}
        },
        "recursive references": lambda word: {"guided_json": {"title": word, "allOf": [{"$ref": "#"}, {"$ref": "#"}]}},
    },
    "plain": {"no tokens": lambda word: {"max_tokens": 0, "user": word}},
    "held": {
        "60 levels": lambda word: _nested(word, 60),
        "3,000 entries": lambda word: {"guided_json": {"enum": [f"{word} {i}" for i in range(3_000)]}},
        "exponential expression": lambda word: {"guided_regex": f"{word}(a*)*(a|aa)+(.*b.{{400}}){{40}}"},
        "nested repetitions": lambda word: {
            "guided_json": {"type": "string", "pattern": f"^{word}((a{{1,99}}){{1,99}}){{1,99}}$"}
        },
    },
}
"""Hostile ones have to be refused; so are plain ones, whose like any client may send: what the hostile ones cost beyond
these is their schemas'. Held ones are within the limits, so that the engine follows them. The argument makes each one
that was not seen before."""


class Attack:
    """All of one kind, in turn; each is asked for in words of its own."""

    def __init__(self, http: httpx.Client, kind: str) -> None:
        self._http = http
        self._rounds = itertools.cycle(
            (name, json.dumps({"messages": USER, "max_tokens": 16, **make("WORD")}).encode())
            for name, make in KINDS[kind].items()
        )
        self._asked = 0

    def run(self, duration_s: float) -> dict[str, dict[str, Any]]:
        statuses: defaultdict[str, Counter[int]] = defaultdict(Counter)
        longest_s: defaultdict[str, float] = defaultdict(float)
        end_s = time.monotonic() + duration_s
        while time.monotonic() < end_s:
            name, body = next(self._rounds)
            self._asked += 1
            start_s = time.monotonic()
            reply = self._http.post(CHAT, content=body.replace(b"WORD", b"w%d" % self._asked))
            longest_s[name] = max(longest_s[name], time.monotonic() - start_s)
            statuses[name][reply.status_code] += 1
        return {name: {"statuses": statuses[name], "longest_s": longest_s[name]} for name in statuses}


def main(url: str, kind: str) -> None:
    with httpx.Client(base_url=url, timeout=60.0, headers={"content-type": "application/json"}) as http:
        attack = Attack(http, kind)
        for line in sys.stdin:
            print(json.dumps(attack.run(float(line))), flush=True)


if __name__ == "__main__":
    os.nice(19)
    main(*sys.argv[1:])
