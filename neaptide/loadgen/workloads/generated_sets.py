"""Synthetic offline sets drawn to the statistics that papers state.

A generator takes fresh content ids, a random generator and the number of requests. It returns requests document by
document, like an unshuffled submission.
"""

from collections.abc import Callable, Iterator

import numpy as np

from neaptide.loadgen.workloads.lengths import Tokens, lognormal_lengths, sampled_lengths, shares_of, uniform_lengths
from neaptide.loadgen.workloads.text_sets import loogle_articles
from neaptide.loadgen.workloads.trace_formats import CHARS_PER_TOKEN
from neaptide.loadgen.workloads.traces import TraceRequest

ContentIds = Iterator[int]
Generator = Callable[[ContentIds, np.random.Generator, int], list[TraceRequest]]

LOOGLE_DOCUMENTS = 105
LOOGLE_REQUESTS = 1951
LOOGLE_PROMPT_TOKENS = 9865
LOOGLE_OUTPUT_TOKENS = {"short": 20, "long": 200}
QUESTION_FRAME_CHARS = len("\n\nQuestion: \nAnswer:")

BATCHLLM_REQUESTS = 6400
BATCHLLM_OUTPUT_TOKENS = 100
INDUSTRY_REQUESTS = 8000
INDUSTRY_INSTRUCTION_TOKENS = 32
INDUSTRY_PREFIX_TOKENS = 1570
INDUSTRY_OWN_TOKENS = 30
INDUSTRY_SHARED_DEGREE = 3.0
INDUSTRY_SAVING = 0.581


def loogle_qa(kind: str) -> Generator:
    """Questions on long documents: the QA sets of Echo (Table 1 and section 7.1); ``kind`` is ``short`` or ``long``.

    105 documents, 1,951 requests, 9,865 prompt tokens on average (document + question), outputs of about 20 or 200
    tokens. Document lengths, questions per document and the lengths of questions and answers follow the bundled LooGLE
    file (five articles, 80 questions). The first two and the answers are scaled to these means. Echo's table gives only
    the mean prompt and "more than 80%" of sharing.
    """

    def generate(ids: ContentIds, rng: np.random.Generator, count: int) -> list[TraceRequest]:
        articles = loogle_articles()
        pairs = [pair for _, pairs in articles for pair in pairs]
        documents = max(1, round(LOOGLE_DOCUMENTS * count / LOOGLE_REQUESTS))
        asked_about = np.quantile([len(pairs) for _, pairs in articles], (np.arange(documents) + 0.5) / documents)
        degrees = rng.permutation(shares_of(count, asked_about))
        question_chars = np.resize([len(question) + QUESTION_FRAME_CHARS for question, _ in pairs], count)
        questions = rng.permutation(question_chars // CHARS_PER_TOKEN)
        shape = sampled_lengths(rng, documents, [len(article) for article, _ in articles], 1e6)
        # a mean over requests: a document counts once for each of its questions
        document_tokens = count * LOOGLE_PROMPT_TOKENS - questions.sum()
        lengths = np.rint(shape * (document_tokens / (shape * degrees).sum())).astype(np.int64)
        outputs = sampled_lengths(rng, count, [len(answer) for _, answer in pairs], LOOGLE_OUTPUT_TOKENS[kind])
        return _on_documents(ids, (), lengths, degrees, questions, outputs)

    return generate


def bros_be(ids: ContentIds, rng: np.random.Generator, count: int) -> list[TraceRequest]:
    """BROS's best-effort work (section 7.1, Table 2): prompts U(512, 1024), outputs U(32, 128), no sharing."""
    prompts = uniform_lengths(rng, count, 512, 1024).tolist()
    outputs = uniform_lengths(rng, count, 32, 128).tolist()
    return [TraceRequest(0.0, ((next(ids), p),), d) for p, d in zip(prompts, outputs, strict=True)]


def batchllm(prefix_tokens: int, own_tokens: int, degree: int) -> Generator:
    """BatchLLM's microbenchmark (section 6.2.1, Figures 5 and 6): ``degree`` prompts per prefix, fixed lengths.

    Outputs have 100 tokens. Only whole groups are generated, so the saving is exactly ``P (1 - 1/D) / (P + O)``.
    """

    def generate(ids: ContentIds, rng: np.random.Generator, count: int) -> list[TraceRequest]:
        groups = max(1, count // degree)
        total = groups * degree
        return _on_documents(
            ids,
            (),
            np.full(groups, prefix_tokens),
            np.full(groups, degree),
            np.full(total, own_tokens),
            np.full(total, BATCHLLM_OUTPUT_TOKENS),
        )

    return generate


def batchllm_industry(ids: ContentIds, rng: np.random.Generator, count: int) -> list[TraceRequest]:
    """BatchLLM's snippet generation (section 6.2.2, Figure 7): instruction, document, query.

    The paper states two levels with a very short first one, about 3 prompts per shared prefix, prefixes of about 1,570
    tokens, own parts of about 30, and a saving of 58.1% (section 6.3.1). A degree of 3 for every document would save
    65%. Both numbers hold if some documents have one query and share only the instruction; their fraction follows from
    the saving. The other degrees are 2 + geometric. The figure gives no more, so these are ours: the spreads (half of
    the mean for documents, a third for queries), the instruction's 32 tokens and the 100 output tokens.
    """
    prompt_tokens = INDUSTRY_PREFIX_TOKENS + INDUSTRY_OWN_TOKENS
    document_tokens = INDUSTRY_PREFIX_TOKENS - INDUSTRY_INSTRUCTION_TOKENS
    saved_tokens = INDUSTRY_SAVING * prompt_tokens - INDUSTRY_INSTRUCTION_TOKENS
    mean_degree = 1 / (1 - saved_tokens / document_tokens)
    documents = max(1, round(count / mean_degree))
    shared = max(1, round((count - documents) / (INDUSTRY_SHARED_DEGREE - 1)))
    ranks = (np.arange(shared) + 0.5) / shared
    extra = np.floor(np.log1p(-ranks) / np.log(1 - 1 / (INDUSTRY_SHARED_DEGREE - 1)))
    degrees = np.ones(documents, np.int64)
    degrees[:shared] = 1 + shares_of(count - documents, 1 + extra)
    lengths = lognormal_lengths(rng, documents, document_tokens, document_tokens / 2)
    # documents count once for each query on them
    lengths = np.rint(lengths * (document_tokens * count / (lengths * degrees).sum())).astype(np.int64)
    own = lognormal_lengths(rng, count, INDUSTRY_OWN_TOKENS, INDUSTRY_OWN_TOKENS / 3)
    head = ((next(ids), INDUSTRY_INSTRUCTION_TOKENS),)
    return _on_documents(ids, head, lengths, degrees, own, np.full(count, BATCHLLM_OUTPUT_TOKENS))


def _on_documents(
    ids: ContentIds,
    head: tuple[tuple[int, int], ...],
    lengths: Tokens,
    degrees: Tokens,
    own_tokens: Tokens,
    output_tokens: Tokens,
) -> list[TraceRequest]:
    """``degrees[k]`` requests on document k: the common prefix, the document, an own part."""
    own = iter(zip(own_tokens.tolist(), output_tokens.tolist(), strict=True))
    requests = []
    for tokens, degree in zip(lengths.tolist(), degrees.tolist(), strict=True):
        document = (*head, (next(ids), tokens))
        for _ in range(degree):
            own_part, output = next(own)
            requests.append(TraceRequest(0.0, (*document, (next(ids), own_part)), output))
    return requests
