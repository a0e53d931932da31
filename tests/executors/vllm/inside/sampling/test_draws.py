"""Values between the extremes: draws have the distribution that was asked for, and penalties their size.

Seeds make every test draw the same each time. A bias for each of a few tokens gives these the probabilities that the
test wants, far above all others.
"""

import math
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from neaptide.executors.contract import StartedExecutor
from tests.executors.vllm.inside.runs import GAP, Run, prompts
from tests.executors.vllm.sampling_cases import CASES, Case

Checkpoint = tuple[Path, PreTrainedModel]
IS_INTERPRETED = bool(os.environ.get("TRITON_INTERPRET"))
NUM_DRAWS = 100 if IS_INTERPRETED else 400
FAR_ABOVE = 60.0
SHAPE = {10: 0.6, 11: 0.25, 12: 0.1, 13: 0.05}
LARGEST_CHI2 = 20.0
"""With three degrees of freedom, one in 6,000 right samplers draws worse."""
LEAST_EXPECTED = 5.0
"""Draws of a token, for its count to say anything."""


@torch.no_grad()
def logits_of(model: PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    found: torch.Tensor = model(torch.tensor([tokens])).logits[0].double()
    return found


def biases(model: PreTrainedModel, prompt: list[int]) -> dict[int, float]:
    """With which the token behind the prompt is drawn as ``SHAPE`` says."""
    logits = logits_of(model, prompt)[-1]
    return {token: FAR_ABOVE + math.log(share) - float(logits[token]) for token, share in SHAPE.items()}


def normed(shares: dict[int, float]) -> dict[int, float]:
    whole = sum(shares.values())
    return {token: share / whole for token, share in shares.items()}


def warmer(temperature: float) -> dict[int, float]:
    return normed({token: share ** (1.0 / temperature) for token, share in SHAPE.items()})


def first(count: int, shares: dict[int, float] = SHAPE) -> dict[int, float]:
    return normed(dict(list(shares.items())[:count]))


DISTRIBUTIONS: list[tuple[dict[str, Any], dict[int, float]]] = [
    ({}, SHAPE),
    ({"temperature": 0.5}, warmer(0.5)),
    ({"temperature": 2.0}, warmer(2.0)),
    ({"top_k": 2}, first(2)),
    ({"top_k": 3}, first(3)),
    ({"top_p": 0.8}, first(2)),
    ({"top_p": 0.9}, first(3)),
    ({"min_p": 0.3}, first(2)),
    ({"min_p": 0.1}, first(3)),
    # In this order: temperature, min-p, top-k, top-p. What is left has the whole probability for what follows.
    ({"temperature": 2.0, "top_p": 0.8}, first(3, warmer(2.0))),
    ({"temperature": 2.0, "min_p": 0.3}, first(3, warmer(2.0))),
    ({"min_p": 0.3, "top_p": 0.65}, first(1)),
    ({"top_k": 2, "top_p": 0.65}, first(1)),
]


def assert_drawn_from(counts: Counter[int], shares: dict[int, float]) -> None:
    """By Pearson's chi-squared; tokens of which few are expected count as one."""
    total = counts.total()
    assert set(counts) <= set(shares), "a token that was cut off"
    cells = [(counts[token], share * total) for token, share in shares.items()]
    often = [cell for cell in cells if cell[1] >= LEAST_EXPECTED]
    rare = [cell for cell in cells if cell[1] < LEAST_EXPECTED]
    if rare:
        often.append((sum(seen for seen, _ in rare), sum(expected for _, expected in rare)))
    chi2 = sum((seen - expected) ** 2 / expected for seen, expected in often)
    assert chi2 < LARGEST_CHI2, f"{dict(counts)} of {total} where {shares} was asked for: {chi2:.0f}"


def test_draws_are_distributed_as_each_request_asked(checkpoint: Checkpoint, started: StartedExecutor) -> None:
    """All kinds beside each other in every step: none may get another's."""
    (prompt,) = prompts(1, seed=31, high=10)
    asked = [
        (params, shares)
        for params, shares in DISTRIBUTIONS
        if not IS_INTERPRETED or not {"top_k", "top_p"} & set(params)  # a kernel that the interpreter does not run
    ]
    given = biases(checkpoint[1], prompt)
    run = Run(started.executor)
    for draw in range(NUM_DRAWS):
        for kind, (params, _) in enumerate(asked):
            run.add(
                f"{kind} {draw}",
                prompt,
                **{"max_tokens": 1, "logit_bias": given, "temperature": 1.0, "seed": draw} | params,
            )
    run.finish()
    for kind, (params, shares) in enumerate(asked):
        drawn = Counter(run.tokens[f"{kind} {draw}"][0] for draw in range(NUM_DRAWS))
        try:
            assert_drawn_from(drawn, shares)
        except AssertionError as error:
            raise AssertionError(f"{params}: {error}") from error


def test_so_are_those_without_a_seed(checkpoint: Checkpoint, started: StartedExecutor) -> None:
    (prompt,) = prompts(1, seed=31, high=10)
    given = biases(checkpoint[1], prompt)
    run = Run(started.executor)
    for draw in range(NUM_DRAWS):
        run.add(f"unseeded {draw}", prompt, max_tokens=1, logit_bias=given, temperature=1.0)
    run.finish()
    assert_drawn_from(Counter(tokens[0] for tokens in run.tokens.values()), SHAPE)


def test_two_draws_of_one_seed_have_nothing_to_do_with_each_other(
    checkpoint: Checkpoint, started: StartedExecutor
) -> None:
    (prompt,) = prompts(1, seed=31, high=10)
    given = biases(checkpoint[1], prompt)
    bias = torch.zeros(logits_of(checkpoint[1], prompt).shape[-1], dtype=torch.double)
    for token, value in given.items():
        bias[token] = value
    shares: dict[int, float] = {}
    for token, share in SHAPE.items():
        second = (logits_of(checkpoint[1], [*prompt, token])[-1] + bias).softmax(-1)
        shares |= {1000 * token + k: share * float(second[k]) for k in range(len(second))}
    run = Run(started.executor)
    for seed in range(NUM_DRAWS):
        run.add(str(seed), prompt, max_tokens=2, logit_bias=given, temperature=1.0, seed=seed)
    run.finish()
    assert_drawn_from(Counter(1000 * tokens[0] + tokens[1] for tokens in run.tokens.values()), shares)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_vllm_keeps_what_it_is_told(started: StartedExecutor, case: Case) -> None:
    """Its class changes values, too: for greedy requests, and where they are too small for it."""
    from neaptide.executors.vllm.sampling import to_vllm

    params = to_vllm(case.params, case.eos_token_ids, case.seed)
    assert {name: getattr(params, name) for name in case.told} == case.told
    assert params.all_stop_token_ids == set(case.told["stop_token_ids"])


# ---- greedy, with what is added and taken away ----

LEADERS = dict.fromkeys(range(20, 28), 30.0)
"""Tokens among which the most likely one is looked for, so that it is often one that has been said."""
SAID_PENALTIES: list[dict[str, Any]] = [
    {"presence_penalty": 1.5},
    {"presence_penalty": -1.5},
    {"frequency_penalty": 0.6},
    {"frequency_penalty": -0.6},
    {"repetition_penalty": 1.1},
    {"repetition_penalty": 0.93},
    {"presence_penalty": 1.0, "frequency_penalty": 0.4, "repetition_penalty": 1.05},
]
NEUTRAL = {"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0}


def wrong_tokens(
    logits: torch.Tensor,
    prompt: list[int],
    said: list[int],
    bias: dict[int, float],
    is_bias_last: bool = False,
    **params: float,
) -> int:
    """How many are not the most likely ones under these parameters, up to a close call.

    Args:
        logits: [prompt and said] of the model alone.
    """
    wrong = 0
    size = logits.shape[-1]
    added = torch.zeros(size, dtype=torch.double)
    added[list(bias)] = torch.tensor(list(bias.values()), dtype=torch.double)
    params = NEUTRAL | params
    for i, token in enumerate(said):
        values = logits[len(prompt) + i - 1].clone()
        values += 0.0 if is_bias_last else added
        seen = torch.bincount(torch.tensor(prompt + said[:i]), minlength=size) > 0
        factor = params["repetition_penalty"]
        values = torch.where(seen, torch.where(values > 0, values / factor, values * factor), values)
        values += added if is_bias_last else 0.0
        counts = torch.bincount(torch.tensor(said[:i], dtype=torch.long), minlength=size)
        values -= params["frequency_penalty"] * counts + params["presence_penalty"] * (counts > 0)
        best = values.topk(2)
        if best.values[0] - best.values[1] >= GAP:
            wrong += token != int(best.indices[0])
    return wrong


@pytest.mark.parametrize("params", SAID_PENALTIES, ids=str)
def test_penalties_have_their_size(checkpoint: Checkpoint, started: StartedExecutor, params: dict[str, float]) -> None:
    run = Run(started.executor)
    (prompt,) = prompts(1, seed=32, low=12, high=13)
    prompt += [20, 21]
    run.add("a", prompt, max_tokens=120, logit_bias=LEADERS, **params)
    run.add("plain", prompt, max_tokens=20)
    run.finish()
    said = run.tokens["a"]
    logits = logits_of(checkpoint[1], prompt + said)
    assert wrong_tokens(logits, prompt, said, LEADERS, **params) == 0
    for name, value in params.items():  # each is seen; and a tenth of one that alone keeps a text from repeating itself
        is_seen_best = len(params) == 1 and value > NEUTRAL[name]
        for other in (NEUTRAL[name], *([value + 0.1 * (value - NEUTRAL[name])] if is_seen_best else [])):
            assert wrong_tokens(logits, prompt, said, LEADERS, **params | {name: other}) > 0, (name, other)
    if params.get("repetition_penalty", 0.0) > 1.0:
        assert wrong_tokens(logits, prompt, said, LEADERS, is_bias_last=True, **params) > 0
    plain = run.tokens["plain"]
    assert wrong_tokens(logits_of(checkpoint[1], prompt + plain), prompt, plain, {}) == 0


def test_a_bias_has_its_size(checkpoint: Checkpoint, started: StartedExecutor) -> None:
    """The second most likely token is brought just in front of the first, or just not."""
    (prompt,) = prompts(1, seed=33)
    best = logits_of(checkpoint[1], prompt)[-1].topk(2)
    first, second = best.indices.tolist()
    lead = float(best.values[0] - best.values[1])
    run = Run(started.executor)
    for name, bias in (
        ("less", {second: lead - 0.01}),
        ("more", {second: lead + 0.01}),
        ("taken", {first: -lead - 0.01}),
        ("kept", {first: -lead + 0.01}),
    ):
        run.add(name, prompt, max_tokens=1, logit_bias=bias)
    run.finish()
    assert run.tokens == {"less": [first], "more": [second], "taken": [second], "kept": [first]}
