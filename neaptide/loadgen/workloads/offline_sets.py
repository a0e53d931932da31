"""Offline sets by name: bundled files, OpenAI batch files and generated sets, and their prefix sharing."""

import itertools
import math
import re
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from neaptide.loadgen.workloads import text_sets
from neaptide.loadgen.workloads.blend_sets import BLEND_REQUESTS, TRACE_TARGETS, blend
from neaptide.loadgen.workloads.generated_sets import (
    BATCHLLM_REQUESTS,
    INDUSTRY_REQUESTS,
    LOOGLE_REQUESTS,
    Generator,
    batchllm,
    batchllm_industry,
    bros_be,
    loogle_qa,
)
from neaptide.loadgen.workloads.sharing import Sharing, prefix_sharing
from neaptide.loadgen.workloads.text_sets import Tokenize
from neaptide.loadgen.workloads.trace_rows import content_name
from neaptide.loadgen.workloads.traces import TraceRequest, check_regular, content_base, data_file, load_lengths

TEXT_SETS = {
    "mmlu": text_sets.mmlu,
    "bbh": text_sets.bbh,
    "gsm8k": text_sets.gsm8k,
    "loogle_wiki_qa": text_sets.loogle_wiki_qa,
}
LENGTH_SETS = ("arxiv_summarization_lengths", "sharegpt_lengths")
EXCERPTS = ("servegen_generation_excerpt", "servegen_translation_excerpt")
FIXED_GENERATORS: dict[str, tuple[Generator, int]] = {
    "loogle-qa-short": (loogle_qa("short"), LOOGLE_REQUESTS),
    "loogle-qa-long": (loogle_qa("long"), LOOGLE_REQUESTS),
    "batchllm-industry": (batchllm_industry, INDUSTRY_REQUESTS),
    **{f"blend-trace-{k}": (blend(*target), BLEND_REQUESTS) for k, target in TRACE_TARGETS.items()},
}
PATTERNS = ("bros-be-N", "batchllm-P-O-sD", "blend-RHO-S")
"""Name patterns with numbers: see ``load_offline``."""
BROS_BATCH = 256
BROS_BATCHES = 10
NAMESPACE_IDS = 1 << 31
"""Number of content ids from a ``content_base`` on."""


@dataclass(slots=True, frozen=True)
class OfflineSet:
    name: str
    requests: list[TraceRequest]
    """In the order of submission. Arrivals are 0 if the source has none."""
    synthetic: bool
    """Drawn to stated statistics, not recorded."""
    batch_size: int | None = None
    """Requests are submitted in groups of this size, each after the previous group has ended; ``None``: all at the
    start."""
    generation: int = 0
    content: str | None = None
    """Identifies the contents; ``None``: the name does."""
    share: str = ""
    """Tenant of offline work that the set belongs to."""
    submitted_s: float = 0.0
    deadline_s: float | None = None
    """Deadline, counted from the submission; ``None``: the common one."""

    @property
    def is_job(self) -> bool:
        """Whether the set is submitted once as a job of its own. The others form one load that may be refilled."""
        return bool(self.share) or self.submitted_s > 0.0 or self.deadline_s is not None

    def sharing(self, block_size: int = 1) -> Sharing:
        """See ``prefix_sharing``; a block size of 1 gives the unaligned bound."""
        return prefix_sharing((request.segments for request in self.requests), block_size)

    def check_refill(self) -> None:
        """Raises ValueError if a content id is outside the set's own namespace, which a refill shifts."""
        namespace = self._namespace(self.generation)
        base = content_base(namespace)
        for request in self.requests:
            for content, _ in request.segments:
                if not 0 <= content - base < NAMESPACE_IDS:
                    raise ValueError(
                        f"offline set {self.name!r} cannot be refilled: content id {content} is not one of the "
                        f"{NAMESPACE_IDS} from content_base({namespace!r})"
                    )

    def refill(self, generation: int) -> "OfflineSet":
        """The same set with content of its own generation, so that a pool can be refilled without end.

        Raises ValueError like ``check_refill``.
        """
        self.check_refill()
        shift = content_base(self._namespace(generation)) - content_base(self._namespace(self.generation))
        requests = [
            replace(r, segments=tuple((content + shift, n) for content, n in r.segments)) for r in self.requests
        ]
        return replace(self, requests=requests, generation=generation)

    def enlarged(self, least_requests: int) -> "OfflineSet":
        """The set repeated until it has that many requests. The copies share no content.

        Raises ValueError like ``check_refill``.
        """
        copies = math.ceil(least_requests / len(self.requests))
        if copies <= 1:
            return self
        self.check_refill()
        base = content_base(self._namespace(self.generation))
        used = 1 + max((content - base for r in self.requests for content, _ in r.segments), default=0)
        shifts = [copy * used for copy in range(min(copies, NAMESPACE_IDS // used))]
        requests = [
            replace(r, segments=tuple((content + shift, n) for content, n in r.segments))
            for shift in shifts
            for r in self.requests
        ]
        return replace(self, requests=requests)

    def _namespace(self, generation: int) -> str:
        return _namespace(self.content or self.name, generation)


def offline_names() -> tuple[str, ...]:
    """The sets that ``load_offline`` knows by a fixed name."""
    return (*TEXT_SETS, *LENGTH_SETS, *EXCERPTS, "bros-be", *FIXED_GENERATORS)


def load_offline(
    spec: str | Path,
    seed: int,
    keep_order: bool = False,
    limit: int | None = None,
    tokenize: Tokenize | None = None,
    recorded_arrivals: bool = False,
) -> OfflineSet:
    """An offline set, shuffled by the seed unless ``keep_order``.

    spec: a name of ``offline_names()``, ``bros-be-N`` (batches of N), ``batchllm-P-O-sD`` (prefix P, own part O,
    sharing degree D) or ``blend-RHO-S`` (density RHO, sharing S: the grid, such as ``blend-1.10-0.25``). Or a file: an
    OpenAI batch file, or a trace in a format of ``trace_formats``.
    limit: most requests: the first of a file, before shuffling; a generated set is drawn with this size.
    recorded_arrivals: keep a trace's arrivals and order; otherwise all arrive at once.
    tokenize: tokenizes the texts of an OpenAI batch file; without it a token is four characters.

    Raises ValueError for an unknown name, an unreadable file, arrivals that were not recorded, and a blend without
    solution.
    """
    name = str(spec)
    generated = _generator(name)
    if generated is None and name not in offline_names():
        if recorded_arrivals:
            return _arriving_set(Path(spec), limit)
        return _file_set(Path(spec), seed, keep_order, limit, tokenize)
    if recorded_arrivals:
        raise ValueError(f"offline set {name!r} has no recorded arrivals: give a trace file, or ROWS@SECONDS")
    base = content_base(_namespace(name, 0))
    rng = np.random.default_rng([base >> 31, seed])
    if generated is None:
        return OfflineSet(name, _ordered(_bundled(name, base, limit), rng, keep_order), synthetic=False)
    generate, count = generated
    requests = generate(itertools.count(base), rng, count if limit is None else min(limit, count))
    return OfflineSet(name, _ordered(requests, rng, keep_order), synthetic=True, batch_size=_batch_size(name))


def _namespace(name: str, generation: int) -> str:
    return f"{name}#{generation}"


def _ordered(requests: list[TraceRequest], rng: np.random.Generator, keep_order: bool) -> list[TraceRequest]:
    return requests if keep_order else [requests[k] for k in rng.permutation(len(requests)).tolist()]


def _generator(name: str) -> tuple[Generator, int] | None:
    if name in FIXED_GENERATORS:
        return FIXED_GENERATORS[name]
    if batch := _batch_size(name):
        return bros_be, BROS_BATCHES * batch
    if match := re.fullmatch(r"batchllm-(\d+)-(\d+)-s(\d+)", name):
        prefix_tokens, own_tokens, degree = map(int, match.groups())
        if min(prefix_tokens, own_tokens, degree) < 1:
            raise ValueError(f"{name}: lengths and degree must be at least 1")
        return batchllm(prefix_tokens, own_tokens, degree), BATCHLLM_REQUESTS
    if match := re.fullmatch(r"blend-(\d+\.?\d*)-(0?\.\d+)", name):
        return blend(float(match[1]), float(match[2])), BLEND_REQUESTS
    return None


def _batch_size(name: str) -> int | None:
    match = re.fullmatch(r"bros-be(?:-([1-9]\d*))?", name)
    return int(match[1] or BROS_BATCH) if match else None


def _bundled(name: str, base: int, limit: int | None) -> list[TraceRequest]:
    if name in TEXT_SETS:
        return TEXT_SETS[name](base, limit)
    suffix = "csv.gz" if name in LENGTH_SETS else "jsonl"
    return load_lengths(data_file("offline", f"{name}.{suffix}"), base, limit)


def arriving(offline: OfflineSet, rows: int, seconds: float) -> OfflineSet:
    """The same set in parts: ``rows`` requests every ``seconds``, the first ones at 0."""
    requests = [replace(request, arrival_s=k // rows * seconds) for k, request in enumerate(offline.requests)]
    return replace(offline, requests=requests)


def _arriving_set(path: Path, limit: int | None) -> OfflineSet:
    _check_file(path)
    content = content_name(path)
    requests = load_lengths(path, content_base(_namespace(content, 0)), limit, recorded_arrivals=True)
    return OfflineSet(path.name, requests, synthetic=False, content=content)


def _file_set(path: Path, seed: int, keep_order: bool, limit: int | None, tokenize: Tokenize | None) -> OfflineSet:
    """The set of an OpenAI batch file or a trace; equal bytes under another name are the same set."""
    _check_file(path)
    content = content_name(path)
    base = content_base(_namespace(content, 0))
    if text_sets.is_openai_batch(path):
        requests = text_sets.openai_batch(base, path, limit, tokenize)
    else:
        requests = load_lengths(path, base, limit)
    rng = np.random.default_rng([base >> 31, seed])
    return OfflineSet(path.name, _ordered(requests, rng, keep_order), synthetic=False, content=content)


def _check_file(path: Path) -> None:
    check_regular(path)
    if not path.is_file():
        raise ValueError(
            f"no offline set {str(path)!r}: neither a file nor one of {', '.join(offline_names())}, nor of the form "
            f"{', '.join(PATTERNS)}"
        )
