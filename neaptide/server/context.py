"""Context of every route: the served model, its tokenizer, the engine, the clocks."""

import hashlib
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from anyio import CapacityLimiter

from neaptide import __version__
from neaptide.engine.params import RequestClass
from neaptide.models.fields import read_json
from neaptide.server.engine_client.client import EngineClient
from neaptide.server.engine_client.interpreter import Interpreter
from neaptide.server.http.body_threads import BodyThreads
from neaptide.server.http.errors import OverloadedError, server_stops
from neaptide.server.http.fair_queue import FairQueue
from neaptide.server.http.own_waits import OwnWaits
from neaptide.server.http.refusals import Refusals
from neaptide.server.openai.schemas import LEAST_REPETITION_PENALTY
from neaptide.server.parsers.choose import AUTO, OutputParsers, choose_parsers
from neaptide.server.structured import call_formats
from neaptide.server.structured.call_formats import CallFormat
from neaptide.server.structured.checker import GrammarChecker
from neaptide.server.text.tokenizer import Tokenizer

MAX_TOP_K = 2**31 - 1


@dataclass(slots=True, frozen=True)
class GenerationDefaults:
    """Sampling that a model's authors recommend, used where a request sets none."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_tokens: int | None = None
    """Longest answer of a chat."""

    @classmethod
    def load(cls, directory: Path) -> "GenerationDefaults":
        """Reads ``generation_config.json``. Missing values, and those for greedy decoding, keep OpenAI's defaults.

        Raises:
            ValueError: a value that no request could ask for.
        """
        file = directory / "generation_config.json"
        config = read_json(file) if file.exists() else {}
        longest = _recommended(config, "max_new_tokens", 0, 1, MAX_TOP_K)
        whatever = cls(
            repetition_penalty=_recommended(config, "repetition_penalty", 1.0, LEAST_REPETITION_PENALTY, 100.0),
            max_tokens=int(longest) or None,
        )
        if config.get("do_sample") is False:
            return whatever
        return replace(
            whatever,
            temperature=_recommended(config, "temperature", 1.0, 0.0, 2.0),
            top_p=_recommended(config, "top_p", 1.0, 0.0, 1.0),
            top_k=max(0, int(_recommended(config, "top_k", 0, -1, MAX_TOP_K))),
            min_p=_recommended(config, "min_p", 0.0, 0.0, 1.0),
        )


def _recommended(config: Mapping[str, object], name: str, default: float, low: float, high: float) -> float:
    value = config.get(name)
    if value is None:
        return default
    if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value <= high:
        raise ValueError(f"generation_config.json: {name} must be a number from {low:g} to {high:.0f}, not {value!r}")
    return value


class Admission:
    """Counts requests between arrival and reply, which bounds the queue.

    A full class refuses tenants that have at least their share of it. Other tenants are still admitted up to their
    share, so that no tenant can fill the class alone. ``n`` tenants hold at most 1 + 1/2 + ... + 1/n times the limit.
    """

    def __init__(self, max_online: int, max_offline: int) -> None:
        self._limits = {RequestClass.ONLINE: max_online, RequestClass.OFFLINE: max_offline}
        self._counts: dict[RequestClass, Counter[str]] = {one: Counter() for one in self._limits}

    def check(self, request_class: RequestClass, tenant: str, choices: int = 1) -> None:
        """Raises OverloadedError if the class has no room for the tenant."""
        limit, counts = self._limits[request_class], self._counts[request_class]
        if counts.total() + choices <= limit:
            return
        share = limit // len(counts.keys() | {tenant})
        if counts[tenant] + choices > share:
            raise no_room(request_class)

    async def admit(self, request_class: RequestClass, tenant: str, choices: int) -> None:
        """As ``enter``, where another process may count."""
        self.enter(request_class, tenant, choices)

    def enter(self, request_class: RequestClass, tenant: str, choices: int) -> None:
        """Adds choices; ``leave`` must follow. Raises OverloadedError if the class has no room."""
        self.check(request_class, tenant, choices)
        self.count_entered(request_class, tenant, choices)

    def count_entered(self, request_class: RequestClass, tenant: str, choices: int) -> None:
        """As ``enter``, of what has been admitted."""
        self._counts[request_class][tenant] += choices

    def leave(self, request_class: RequestClass, tenant: str, choices: int) -> None:
        """Removes choices."""
        counts = self._counts[request_class]
        counts[tenant] -= choices
        if not counts[tenant]:
            del counts[tenant]

    def count(self, request_class: RequestClass) -> int:
        """Number of running and waiting choices."""
        return self._counts[request_class].total()


def no_room(request_class: RequestClass) -> OverloadedError:
    """Error for a request whose class is full."""
    online = request_class is RequestClass.ONLINE
    return OverloadedError(online=online, retry_after_s=1 if online else 10)


@dataclass(slots=True, kw_only=True)
class ServingContext:
    """One served model with its engine client. Times are in seconds."""

    model_id: str
    tokenizer: Tokenizer
    client: EngineClient
    created: int
    """Unix time that ``/v1/models`` reports."""
    max_model_len: int
    vocab_size: int
    """Rows of the embedding table, which bound the token ids that a caller may send."""
    fingerprint: str = ""
    """Fingerprint of model, tokenizer and template; see ``fingerprint.py``."""
    eos_token_ids: tuple[int, ...] = ()
    model_aliases: tuple[str, ...] = ()
    """Further names that requests may use for the same model."""
    generation_defaults: GenerationDefaults = GenerationDefaults()
    ttft_slo_s: float = 1.0
    tpot_slo_s: float = 0.05
    policy: str = ""
    """Name of the scheduling policy, for displays."""
    clock: Callable[[], float] = time.monotonic
    """``CLOCK_MONOTONIC``: the engine's clock, so that its stamps and ours can be compared."""
    wall_clock: Callable[[], float] = time.time
    keep_alive_s: float = 10.0
    """Longest silence on an event stream before a comment; 0 sends none."""
    flex_wait_s: float = 600.0
    """Longest wait for the first token of a flex request that is not streamed; after that it gets 429."""
    admission: Admission = field(default_factory=lambda: Admission(max_online=4096, max_offline=4096))
    waits: OwnWaits = field(init=False)
    """Waits of chats in this process, for which further chats are refused."""
    bodies: BodyThreads = field(default_factory=BodyThreads)
    """Threads that parse and tokenize."""
    shape_limiter: CapacityLimiter = field(default_factory=lambda: CapacityLimiter(2))
    """Threads that format long replies. They are separate, so that streams do not wait for tokenization."""
    grammar_turns: FairQueue = field(default_factory=FairQueue)
    """Queue for grammar compilation, fair between keys."""
    refusals: Refusals = field(default_factory=Refusals)
    """Time spent on each caller's refused requests, which delays further refusals."""
    follows_grammars: bool = True
    """Whether the executor enforces structured output."""
    max_masked_ends: int | None = None
    """Most stop tokens, the model's own included, that the executor can mask for ``min_tokens``; None: any number."""
    engine_python: str | None = None
    """The engine's own interpreter, if it has one. Grammars are checked there, by the version that enforces them."""
    tool_call_parser: str = AUTO
    reasoning_parser: str = AUTO
    """Names of the parsers; see ``parsers.choose``."""
    grammars: GrammarChecker = field(init=False)
    parsers: OutputParsers = field(init=False)
    """How the model writes tool calls and reasoning."""
    draining: bool = False
    """Set at shutdown: new work is refused, running streams may end."""

    def __post_init__(self) -> None:
        self.waits = OwnWaits(self.ttft_slo_s, lambda: self.clock())
        self.grammars = GrammarChecker(
            self.tokenizer.directory,
            self.vocab_size,
            self.eos_token_ids,
            interpreter=Interpreter(self.engine_python),
        )
        template = self.tokenizer.template
        self.parsers = choose_parsers(
            self.tool_call_parser,
            self.reasoning_parser,
            None if template is None else template.source,
            self.tokenizer.added_tokens,
        )

    @property
    def call_format(self) -> CallFormat:
        """The format of calls that a grammar forces."""
        tools = self.parsers.tools
        return call_formats.PLAIN if tools is None or tools.grammar is None else tools.grammar

    @property
    def system_fingerprint(self) -> str | None:
        """Identifies the system that made a reply. With another value, the same seed may give other tokens."""
        if not self.fingerprint:
            return None
        return "fp_" + hashlib.sha256(f"{__version__} {self.fingerprint}".encode()).hexdigest()[:12]

    def check_open(self) -> None:
        """Raises UnavailableError if new work is refused because the server stops."""
        if self.draining:
            raise server_stops()

    def serves(self, model: str) -> bool:
        """Whether a request's ``model`` names the served model; an empty one does."""
        return model in ("", self.model_id) or model in self.model_aliases
