"""The mixed load of ``lab.benchmarks.soak``: clients that behave, leave, send nonsense, and bring batch files."""

import asyncio
import json
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

from neaptide.data import skills
from neaptide.loadgen.client.batches import TERMINAL, get_batch, submit_batch
from neaptide.loadgen.client.client import StreamClient

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MODEL = "neaptide-tiny"
MAX_TOKENS = 96
LINES = 24
"""Lines of a batch."""
THREADS = 8
"""At least as many as the server tokenizes with."""
BATCH_POLL_S = 1.0
MOST_NOTES = 20
EXPLAINED = frozenset({429, 503})
"""What a server that is full, or whose engine has just been replaced, may say, with when to come again."""

REFUSED: tuple[tuple[str, str, bytes], ...] = (
    ("POST", CHAT, b""),
    ("POST", CHAT, b"{"),
    ("POST", CHAT, b"[1, 2]"),
    ("POST", CHAT, b'{"messages": "hi"}'),
    ("POST", CHAT, b'{"messages": [{"role": "wizard", "content": "hi"}]}'),
    ("POST", CHAT, b'{"messages": [{"role": "user", "content": "hi"}], "temperature": "hot"}'),
    ("POST", CHAT, b'{"messages": [{"role": "user", "content": "hi"}], "max_tokens": -1}'),
    ("POST", CHAT, b'{"messages": [{"role": "user", "content": "hi"}], "model": "no-such-model"}'),
    ("POST", CHAT, b'{"messages": [{"role": "user", "content": "' + b"a b " * 20_000 + b'"}]}'),
    ("POST", CHAT, b"\xff\xfe\x00"),
    ("POST", COMPLETIONS, b'{"prompt": [1, 2, 999999]}'),
    ("POST", COMPLETIONS, b'{"prompt": "a", "n": 100000}'),
    ("POST", "/v1/batches", b'{"input_file_id": "file-nothing", "endpoint": "/v1/nothing"}'),
    ("GET", "/v1/batches/batch_nothing", b""),
    ("GET", "/v1/files/file-nothing/content", b""),
    ("GET", "/v1/nothing", b""),
    ("PUT", CHAT, b"{}"),
)
"""Each must be answered with a 4xx in OpenAI's shape."""
BAD_FILE = b'{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": 7}}\n'


@dataclass(slots=True)
class Ledger:
    """What was asked, and what became of it."""

    asked: Counter[str] = field(default_factory=Counter)
    answered: Counter[str] = field(default_factory=Counter)
    left: Counter[str] = field(default_factory=Counter)
    """Clients that left on purpose and need no answer."""
    wrong: Counter[str] = field(default_factory=Counter)
    """Answers that are not what the model was trained to say; a few are."""
    explained: Counter[int] = field(default_factory=Counter)
    unexplained: Counter[int] = field(default_factory=Counter)
    """5xx."""
    not_refused: int = 0
    """Malformed requests that got something else than a 4xx in OpenAI's shape."""
    notes: list[str] = field(default_factory=list)

    @property
    def lost(self) -> int:
        """Requests that were owed an answer and got none."""
        return self.asked.total() - self.answered.total() - self.left.total()

    def note(self, text: str) -> None:
        if len(self.notes) < MOST_NOTES:
            self.notes.append(text)

    def take_reply(self, kind: str, reply: httpx.Response) -> bool:
        """Books a whole reply to an ordinary request; True if it is the answer asked for."""
        self.answered[kind] += 1
        if reply.status_code == 200:
            return True
        self.note(f"{kind}: HTTP {reply.status_code}: {reply.text[:200]}")
        if is_explained(reply):
            self.explained[reply.status_code] += 1
        elif reply.status_code >= 500:
            self.unexplained[reply.status_code] += 1
        else:
            self.wrong[kind] += 1
        return False


def error_of(reply: httpx.Response) -> dict[str, Any] | None:
    """The error in OpenAI's shape, if it is one."""
    try:
        error = reply.json()["error"]
        return error if error["message"] and error["type"] else None
    except (ValueError, KeyError, TypeError):
        return None


def is_explained(reply: httpx.Response) -> bool:
    return reply.status_code in EXPLAINED and error_of(reply) is not None and "retry-after" in reply.headers


@dataclass(slots=True)
class Clients:
    """Every kind of client; each method is one visit."""

    http: httpx.AsyncClient
    streams: StreamClient
    ledger: Ledger
    rng: random.Random

    def question(self) -> skills.Example:
        return skills.single(self.rng.choice(skills.SKILLS), self.rng, held_out=True)

    async def streamed(self) -> None:
        example = self.question()
        record = await self.streams.chat(example.messages, MAX_TOKENS)
        if record.error is not None:
            self._stream_failed("streamed", record.error)
            return
        self.ledger.answered["streamed"] += 1
        self.ledger.wrong["streamed"] += not skills.is_correct(example, record.text)

    def _stream_failed(self, kind: str, error: str) -> None:
        """An HTTP status is an answer; a stream that broke off is a loss."""
        self.ledger.note(f"{kind}: {error}")
        if error.startswith("HTTP "):
            status = int(error.split()[1].rstrip(":"))
            self.ledger.answered[kind] += 1
            if status < 500 and status not in EXPLAINED:
                self.ledger.wrong[kind] += 1
            else:
                (self.ledger.explained if status in EXPLAINED else self.ledger.unexplained)[status] += 1

    async def whole(self) -> None:
        example = self.question()
        body = {"model": MODEL, "messages": example.messages, "max_tokens": MAX_TOKENS, "temperature": 0}
        reply = await self.http.post(CHAT, json=body | {"service_tier": self.rng.choice(("default", "flex"))})
        if self.ledger.take_reply("whole", reply):
            text = reply.json()["choices"][0]["message"]["content"]
            self.ledger.wrong["whole"] += not skills.is_correct(example, text)

    async def several(self) -> None:
        body = {"model": MODEL, "prompt": "Spell ocean.", "max_tokens": 12, "n": 2, "logprobs": 2, "temperature": 0.8}
        reply = await self.http.post(COMPLETIONS, json=body | {"seed": self.rng.randrange(1000)})
        if self.ledger.take_reply("several", reply):
            self.ledger.wrong["several"] += len(reply.json()["choices"]) != 2

    async def leaves_a_stream(self) -> None:
        messages = self.question().messages
        patience_s = self.rng.uniform(0.0, 0.3)
        record = await self.streams.chat(messages, 400, cancel_after_s=patience_s, ignore_eos=True)
        if record.cancelled:
            self.ledger.left["leaves_a_stream"] += 1
        elif record.error is None:
            self.ledger.answered["leaves_a_stream"] += 1
        else:
            self._stream_failed("leaves_a_stream", record.error)

    async def leaves_unanswered(self) -> None:
        body = {"model": MODEL, "messages": self.question().messages, "max_tokens": 400, "ignore_eos": True}
        try:
            async with asyncio.timeout(self.rng.uniform(0.0, 0.3)):
                reply = await self.http.post(CHAT, json=body)
        except TimeoutError:
            self.ledger.left["leaves_unanswered"] += 1
        else:
            self.ledger.take_reply("leaves_unanswered", reply)

    async def nonsense(self) -> None:
        method, path, content = self.rng.choice(REFUSED)
        reply = await self.http.request(method, path, content=content, headers={"content-type": "application/json"})
        self.ledger.answered["nonsense"] += 1
        if not 400 <= reply.status_code < 500 or error_of(reply) is None:
            self.ledger.not_refused += 1
            self.ledger.note(f"{method} {path} {content[:60]!r}: HTTP {reply.status_code}: {reply.text[:200]}")

    async def every_nonsense(self) -> None:
        """All of it, some at once: the longest prompt takes each thread that tokenizes to its most memory."""
        for method, path, content in REFUSED:
            headers = {"content-type": "application/json"}
            asked = [self.http.request(method, path, content=content, headers=headers) for _ in range(THREADS)]
            await asyncio.gather(*asked)

    async def looks(self) -> None:
        path = self.rng.choice(("/metrics", "/v1/models", "/dashboard", "/health", "/v1/batches"))
        self.ledger.take_reply("looks", await self.http.get(path))

    async def batch(self) -> None:
        """A file that is worked off, cancelled on its way, or refused; its files are deleted then."""
        fate = self.rng.choice(("worked off", "worked off", "cancelled", "refused"))
        examples = [self.question() for _ in range(LINES)]
        content = BAD_FILE if fate == "refused" else _batch_file(examples)
        batch = await submit_batch(self.http, "soak.jsonl", content)
        await asyncio.sleep(self.rng.uniform(0.0, 0.5))
        if fate == "cancelled":
            await self.http.post(f"/v1/batches/{batch['id']}/cancel")
        while batch["status"] not in TERMINAL:
            await asyncio.sleep(BATCH_POLL_S)
            batch = await get_batch(self.http, batch["id"])
        results = b""
        for file_id in (batch["output_file_id"], batch["error_file_id"]):
            if file_id is not None:
                results += (await self.http.get(f"/v1/files/{file_id}/content")).raise_for_status().content
        if fault := batch_fault(fate, batch, results):
            self.ledger.note(f"batch {batch['id']}, to be {fate}: {fault}")
            return
        for file_id in (batch["input_file_id"], batch["output_file_id"], batch["error_file_id"]):
            if file_id is not None:
                (await self.http.delete(f"/v1/files/{file_id}")).raise_for_status()
        self.ledger.answered["batch"] += 1


def _batch_file(examples: list[skills.Example]) -> bytes:
    lines = []
    for index, example in enumerate(examples):
        body = {"model": MODEL, "messages": example.messages, "max_tokens": MAX_TOKENS, "temperature": 0}
        lines.append(json.dumps({"custom_id": str(index), "method": "POST", "url": CHAT, "body": body}))
    return ("\n".join(lines) + "\n").encode()


def batch_fault(fate: str, batch: Mapping[str, Any], results: bytes) -> str | None:
    """What is wrong with a batch that is over; None if every line of it is accounted for."""
    wanted = {"worked off": {"completed"}, "cancelled": {"cancelled", "completed"}, "refused": {"failed"}}[fate]
    if batch["status"] not in wanted:
        return f"it is {batch['status']}: {batch['errors']}"
    if fate == "refused":
        return None
    counts = batch["request_counts"]
    ids = Counter(json.loads(line)["custom_id"] for line in results.splitlines())
    # A cancel may come before the file is checked: then there are no lines yet.
    if fate == "cancelled" and not counts["total"]:
        return None
    num_ended = counts["completed"] + counts["failed"]
    # Lines that a cancel kept from running count as neither.
    is_counted = num_ended <= counts["total"] if fate == "cancelled" else num_ended == counts["total"]
    if not is_counted or counts["total"] != LINES:
        return f"its counts are {counts}"
    if len(ids) != LINES or max(ids.values()) > 1:
        return f"{len(ids)} of {LINES} lines are in its files, the most frequent {max(ids.values(), default=0)} times"
    if fate == "worked off" and counts["failed"]:
        return f"{counts['failed']} lines failed"
    return None


Visit = Callable[[Clients], Awaitable[None]]
RATES_RPS: Mapping[Visit, float] = {
    Clients.streamed: 0.4,
    Clients.whole: 0.2,
    Clients.several: 0.1,
    Clients.leaves_a_stream: 0.2,
    Clients.leaves_unanswered: 0.1,
    Clients.nonsense: 0.4,
    Clients.looks: 0.2,
    Clients.batch: 0.05,
}
"""Visits a second of each kind: gentle, for what is looked for does not need a crowd."""


async def visit(clients: Clients, kind: Visit, name: str) -> None:
    """One visit, booked; what the connection does not survive is a loss."""
    clients.ledger.asked[name] += 1
    try:
        await kind(clients)
    except (httpx.HTTPError, ValueError, KeyError) as error:
        clients.ledger.note(f"{name}: {type(error).__name__}: {error}")
