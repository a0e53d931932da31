"""Requests that are made to stop others, by name. ``ATTACKS`` is the list: whoever knows another way adds it there.

``python -m lab.benchmarks.hostile.attacks URL NAME`` attacks until its standard input ends, and then prints one JSON
line: how often each status was answered. A process of its own, at the lowest priority: attackers do not share the
server's cores.
"""

import asyncio
import itertools
import json
import os
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from neaptide.loadgen.client.batches import TERMINAL, get_batch, submit_batch

CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "What is 21 + 34?"}]
KEYS = {"online": "evil-online", "flex": "evil-flex", "batch": "evil-batch"}
"""API keys by tier; ``FLAGS`` passes them to the server."""
FLAGS = ["--api-key", KEYS["online"], "--api-key", f"{KEYS['flex']}:flex", "--api-key", f"{KEYS['batch']}:batch"]
LONG = 60_000
"""Characters of a long choice."""
TIMEOUT_S = 600.0

Body = dict[str, Any]
Send = Callable[[httpx.AsyncClient, int], Awaitable[int]]
"""Asks for the request of this number and returns the status of its answer."""


@dataclass(frozen=True, slots=True)
class Attack:
    """A number of clients. Each sends one request after the other, none of them twice."""

    send: Send
    clients: int = 1
    tier: str = "online"
    flags: Sequence[str] = ()
    """What the server must be started with for it."""
    like: str = ""
    """Name of an attack that is the same load without its hostile part; chats are measured with it as well."""


def asks(make: Callable[[int], Body], path: str = CHAT) -> Send:
    """One request whose body is made of its number."""

    async def send(http: httpx.AsyncClient, number: int) -> int:
        return (await http.post(path, json={"messages": USER} | make(number))).status_code

    return send


def batches(make: Callable[[int], Body], lines: int) -> Send:
    """Sends a batch of this many lines and waits for its end. The statuses are those of its lines."""

    async def send(http: httpx.AsyncClient, number: int) -> int:
        numbers = range(number * lines, (number + 1) * lines)
        entries = [
            {"custom_id": str(i), "method": "POST", "url": CHAT, "body": {"model": "neaptide-tiny", "messages": USER}}
            for i in numbers
        ]
        for i, entry in zip(numbers, entries, strict=True):
            entry["body"] |= make(i)  # type: ignore[operator]
        batch = await submit_batch(
            http, "attack.jsonl", b"".join(json.dumps(entry).encode() + b"\n" for entry in entries)
        )
        while batch["status"] not in TERMINAL:
            await asyncio.sleep(0.2)
            batch = await get_batch(http, batch["id"])
        return 200 if batch["status"] == "completed" and not batch["request_counts"]["failed"] else 400

    return send


def long_choice(letter: str = "x", copies: int = 128) -> Body:
    choice = [letter * LONG]
    return {"n": copies, "max_tokens": 4, "temperature": 1, "structured_outputs": {"choice": choice}}


def distinct_choice(number: int) -> Body:
    return {"max_tokens": 60, "structured_outputs": {"choice": [f"{number} " + "x" * LONG]}}


def distinct_pattern(number: int) -> Body:
    pattern = f"w{number}([a-z ]*[aeiou][a-z ]{{18}})+[0-9]?"
    return {"max_tokens": 60, "temperature": 1, "structured_outputs": {"regex": pattern}}


def ambiguous(number: int, copies: int = 128) -> Body:
    """Every letter may be any of 900 rules: each mask and each token take tens of milliseconds."""
    names = [f"b{i}" for i in range(900)]
    rules = [f"{name}: /[a-z]/" for name in names]
    grammar = "\n".join([f'start: "{number} " a*', f"a: {'|'.join(names)}", *rules])
    return {"n": copies, "max_tokens": 40, "temperature": 1, "structured_outputs": {"grammar": grammar}}


def gets(path: str) -> Send:
    async def send(http: httpx.AsyncClient, number: int) -> int:
        return (await http.get(path)).status_code

    return send


def raw(make: Callable[[], bytes], path: str = CHAT) -> Send:
    """A body that is made once, whatever it is."""
    body = None

    async def send(http: httpx.AsyncClient, number: int) -> int:
        nonlocal body
        body = body or make()
        return (await http.post(path, content=body, headers={"content-type": "application/json"})).status_code

    return send


async def uploads(http: httpx.AsyncClient, number: int) -> int:
    """A file of 20 MB that is removed again."""
    files = {"file": ("attack", b"x" * 20_000_000, "application/octet-stream")}
    reply = await http.post("/v1/files", files=files, data={"purpose": "user_data"})
    if reply.status_code == 200:
        await http.delete(f"/v1/files/{reply.json()['id']}")
    return reply.status_code


def refused_pattern(number: int) -> Body:
    """It takes the compiler more than the half second of processor time that it may have."""
    return {"structured_outputs": {"regex": "a?" * 10_000 + str(number)}}


def prompted(number: int) -> Body:
    return {"prompt": [6 + (number * 7 + i * i) % 300 for i in range(1_000)], "max_tokens": 1}


def scored(number: int) -> Body:
    """Every token of the prompt with its 20 most likely alternatives."""
    return prompted(number) | {"echo": True, "logprobs": 20}


EDITS: Body = {
    "repetition_penalty": 1.1,
    "presence_penalty": 1.0,
    "frequency_penalty": 0.5,
    "logit_bias": {str(i): 1.0 for i in range(6, 306)},
    "min_tokens": 200,
    "stop_token_ids": list(range(6, 134)),
    "stop": ["a" * 1023 + "b", "ab" * 500 + "c", "x" * 1024, "y" * 1024],
}
"""All that is done to a row of logits and to a piece of text."""
MANY: Body = {"n": 128, "max_tokens": 200, "temperature": 1.0, "ignore_eos": True}


ATTACKS: dict[str, Attack] = {
    "n=128 of free text": Attack(asks(lambda _: {"n": 128, "max_tokens": 4, "temperature": 1})),
    "n=128 of a long choice": Attack(asks(lambda _: long_choice()), like="n=128 of free text"),
    "60 tokens of it": Attack(asks(lambda _: long_choice() | {"max_tokens": 60})),
    "the same from flex": Attack(asks(lambda _: long_choice() | {"service_tier": "flex"}), tier="flex"),
    "the same from a batch": Attack(batches(lambda _: long_choice(copies=1) | {"max_tokens": 60}, 64), tier="batch"),
    "64 distinct choices at once": Attack(asks(distinct_choice), clients=64),
    "200 distinct patterns at once": Attack(asks(distinct_pattern), clients=200),
    "n=128 of an ambiguous grammar": Attack(asks(ambiguous)),
    "an ambiguous grammar from a batch": Attack(batches(lambda i: ambiguous(i // 64, copies=1), 64), tier="batch"),
    "24 clients whose patterns are refused": Attack(asks(refused_pattern), clients=24),
    "n=128": Attack(asks(lambda _: MANY)),
    "n=128, 20 alternatives": Attack(asks(lambda _: MANY | {"logprobs": True, "top_logprobs": 20}), like="n=128"),
    "n=128, top-p": Attack(asks(lambda _: MANY | {"top_p": 0.9, "top_k": 100, "min_p": 0.01}), like="n=128"),
    "n=128, penalties, biases, stops": Attack(asks(lambda _: MANY | EDITS), like="n=128"),
    "the same from flex, streams": Attack(asks(lambda _: MANY | EDITS | {"service_tier": "flex"}), tier="flex"),
    "lines with 20 alternatives from a batch": Attack(
        batches(lambda _: {"max_tokens": 60, "logprobs": True, "top_logprobs": 20} | EDITS | {"min_tokens": 60}, 256),
        tier="batch",
    ),
    "8 prompts of 1,000": Attack(asks(prompted, "/v1/completions"), clients=8),
    "8 prompts scored": Attack(asks(scored, "/v1/completions"), clients=8, like="8 prompts of 1,000"),
    "2,048 prompts at once": Attack(
        asks(lambda _: {"prompt": ["a b c"] * 2048, "max_tokens": 1}, "/v1/completions"), clients=4
    ),
    "8 long prompts": Attack(asks(lambda _: {"messages": [{"role": "user", "content": "word " * 180_000}]}), clients=8),
    "8 long texts to count": Attack(asks(lambda i: {"prompt": f"{i} word " * 30_000}, "/tokenize"), clients=8),
    "10,000 messages": Attack(asks(lambda _: {"messages": USER * 10_000}), clients=8),
    "bodies of 20 MB": Attack(raw(lambda: b'{"prompt": "' + b"x" * 20_900_000 + b'"}', "/v1/completions"), clients=4),
    "bodies of a million numbers": Attack(raw(lambda: b'{"prompt": [' + b"1," * 1_000_000 + b"1]}"), clients=8),
    "32 scrapers": Attack(gets("/metrics"), clients=32),
    "16 readers of lists": Attack(gets("/v1/batches?limit=100"), clients=16),
    "4 uploads of 20 MB": Attack(uploads, clients=4),
}


async def run(url: str, name: str) -> Counter[int]:
    """Attacks until standard input ends."""
    attack, numbers, statuses = ATTACKS[name], itertools.count(), Counter[int]()
    limits = httpx.Limits(max_connections=None)
    headers = {"authorization": f"Bearer {KEYS[attack.tier]}"}

    async def client(http: httpx.AsyncClient) -> None:
        while True:
            try:
                statuses[await attack.send(http, next(numbers))] += 1
            except httpx.HTTPStatusError as error:
                statuses[error.response.status_code] += 1
            except httpx.TransportError:
                statuses[0] += 1  # the connection is gone
            if max(statuses, default=0) >= 400:
                await asyncio.sleep(0.05)  # a refusal costs next to nothing, and is no measure of one

    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, limits=limits, headers=headers) as http:
        attacking = asyncio.gather(*(client(http) for _ in range(attack.clients)))
        await asyncio.to_thread(sys.stdin.read)
        attacking.cancel()
        await asyncio.gather(attacking, return_exceptions=True)
    return statuses


if __name__ == "__main__":
    os.nice(19)
    print(json.dumps(asyncio.run(run(*sys.argv[1:]))), flush=True)
