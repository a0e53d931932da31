"""Each sampling parameter on small exact cases; the random stream; the distribution that comes out."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from neaptide.engine.params import SamplingParams
from neaptide.engine.steps.plan import NewRequest
from neaptide.executors.torch.request_state import RequestState
from neaptide.executors.torch.sampling.logits_edits import edit_logits
from neaptide.executors.torch.sampling.random_stream import request_seed, uniforms
from neaptide.executors.torch.sampling.sampler import draw, filtered_probabilities, sample

EOS = (2,)


def state(
    params: SamplingParams, prompt: tuple[int, ...] = (5,), output: tuple[int, ...] = (), request_id: str = "r"
) -> RequestState:
    made = RequestState(NewRequest(request_id, list(prompt), params), EOS, engine_seed=0)
    tokens = list(prompt + output)
    made.observe(tokens, 0)
    return made


def edited(logits: list[float], made: RequestState, position: int = 0) -> list[float]:
    values: list[float] = edit_logits(torch.tensor([logits]), [made], [position])[0].tolist()
    return values


def kept(logits: Tensor, **fields: Any) -> list[int]:
    """Tokens that the filters leave."""
    made = state(SamplingParams(**fields))
    return filtered_probabilities(logits.unsqueeze(0), [made])[0].nonzero().squeeze(1).tolist()


# ---- edits -------------------------------------------------------------------------------------------------------


def test_presence_and_frequency_count_output_tokens_only() -> None:
    made = state(SamplingParams(presence_penalty=0.5, frequency_penalty=0.25), prompt=(1, 1, 3), output=(2, 2, 0))
    assert edited([1.0, 1.0, 1.0, 1.0], made) == [0.25, 1.0, 0.0, 1.0]


def test_repetition_penalty_is_that_of_transformers() -> None:
    made = state(SamplingParams(repetition_penalty=1.7), prompt=(1, 4), output=(2, 1))
    logits = torch.randn(1, 8)
    expected = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([[1, 4, 2, 1]]), logits.clone())
    torch.testing.assert_close(edit_logits(logits, [made], [2]), expected)


def test_logit_bias_adds_and_ignores_unknown_tokens() -> None:
    made = state(SamplingParams(logit_bias={1: 2.5, 3: -100.0, 4: 1.0, 99: 1.0, -1: 1.0}))
    assert edited([0.0, 0.0, 0.0, 0.0], made) == [0.0, 2.5, 0.0, -100.0]


def test_min_tokens_masks_ends_until_reached() -> None:
    made = state(SamplingParams(min_tokens=2, stop_token_ids=(0,)))
    assert edited([1.0, 1.0, 1.0], made, position=1) == [-np.inf, 1.0, -np.inf]
    assert edited([1.0, 1.0, 1.0], made, position=2) == [1.0, 1.0, 1.0]


def test_ignored_eos_is_never_masked() -> None:
    made = state(SamplingParams(min_tokens=2, ignore_eos=True))
    assert edited([1.0, 1.0, 9.0], made) == [1.0, 1.0, 9.0]


def test_edits_touch_their_own_row_and_never_the_raw_logits() -> None:
    logits = torch.zeros(3, 4)
    states = [
        state(SamplingParams()),
        state(SamplingParams(logit_bias={1: 1.0}, presence_penalty=1.0), output=(1,)),
        state(SamplingParams()),
    ]
    result = edit_logits(logits, states, [0, 1, 0])
    assert result.count_nonzero() == 0  # +1 - 1
    states[1] = state(SamplingParams(logit_bias={1: 1.0}))
    assert edit_logits(logits, states, [0, 0, 0]).nonzero().tolist() == [[1, 1]]
    assert logits.count_nonzero() == 0
    assert edit_logits(logits, [states[0]] * 3, [0, 0, 0]) is logits


def test_output_tokens_count_once_across_recomputation() -> None:
    made = state(SamplingParams(frequency_penalty=1.0), prompt=(1, 2), output=(3, 3))
    made.observe([1, 2, 3], 0)
    made.observe([3, 4], 3)
    assert [part.tolist() for part in made.output_counts] == [[3, 4], [2.0, 1.0]]


# ---- filters -----------------------------------------------------------------------------------------------------

LOGITS = torch.log(torch.tensor([0.05, 0.4, 0.1, 0.3, 0.15]))


@pytest.mark.parametrize(
    ("fields", "tokens"),
    [
        ({}, [0, 1, 2, 3, 4]),
        ({"top_k": 2}, [1, 3]),
        ({"top_k": 99}, [0, 1, 2, 3, 4]),
        ({"top_p": 0.69}, [1, 3]),
        ({"top_p": 0.71}, [1, 3, 4]),
        ({"top_p": 1e-9}, [1]),
        ({"top_p": 1e-60}, [1]),  # it is 0 in fp32
        ({"min_p": 0.3}, [1, 3, 4]),
        ({"min_p": 1.0}, [1]),
        ({"top_k": 2, "top_p": 0.55}, [1]),  # 0.4 of the 0.7 that top-k leaves is 0.57
        ({"top_k": 4, "min_p": 0.5}, [1, 3]),
        ({"temperature": 1e-6}, [1]),
        ({"temperature": 1e-60}, [1]),  # it is 0 in fp32
    ],
)
def test_filters_leave_exactly(fields: dict[str, Any], tokens: list[int]) -> None:
    assert kept(LOGITS, **fields) == tokens


def test_logits_that_overflow_over_a_tiny_temperature_leave_the_largest() -> None:
    assert kept(torch.tensor([1e9, 2e9, -1e9]), temperature=1e-30) == [1]


def test_equal_logits_leave_exactly_k() -> None:
    assert kept(torch.zeros(6), top_k=2) == [0, 1]


@pytest.mark.parametrize(("top_p", "tokens"), [(0.25, [0]), (0.5, [0, 1]), (0.51, [0, 1, 2]), (0.75, [0, 1, 2])])
def test_top_p_ends_with_the_token_that_reaches_the_share(top_p: float, tokens: list[int]) -> None:
    assert kept(torch.zeros(4), top_p=top_p) == tokens


@pytest.mark.parametrize("seed", range(5))
def test_filters_are_those_of_transformers(seed: int) -> None:
    torch.manual_seed(seed)
    logits = torch.randn(1, 50) * 2
    params = SamplingParams(temperature=0.7, top_k=20, top_p=0.8, min_p=0.05)
    scores = TemperatureLogitsWarper(0.7)(None, logits)
    for warper in (TopKLogitsWarper(20), TopPLogitsWarper(0.8), MinPLogitsWarper(0.05)):
        scores = warper(None, scores)
    probabilities = filtered_probabilities(logits, [state(params)])
    torch.testing.assert_close(probabilities / probabilities.sum(), torch.softmax(scores, dim=-1))


def test_rows_are_filtered_each_by_its_own_parameters() -> None:
    rows = [SamplingParams(top_k=1), SamplingParams(), SamplingParams(min_p=0.5), SamplingParams(top_p=0.5)]
    together = filtered_probabilities(LOGITS.repeat(4, 1), [state(params) for params in rows])
    for row, params in enumerate(rows):
        torch.testing.assert_close(together[row], filtered_probabilities(LOGITS[None], [state(params)])[0])


# ---- the random stream -------------------------------------------------------------------------------------------


def test_stream_is_fixed() -> None:
    """Golden numbers: seeded requests must repeat across releases."""
    golden = [0.28176129772258207, 0.9187752334647712, 0.6881302441068726, 0.33085413846619716]
    assert uniforms([0, 1, -1, 1 << 70], [0, 7, 7, 100_000]).tolist() == golden


def test_stream_is_uniform_over_seeds_and_positions() -> None:
    for numbers in (uniforms(list(range(4000)), [3] * 4000), uniforms([3] * 4000, list(range(4000)))):
        counts = np.histogram(numbers, bins=20, range=(0, 1))[0]
        assert ((counts - 200) ** 2 / 200).sum() < 43.8  # chi-square, 19 degrees of freedom, p = 0.001
        assert abs(np.corrcoef(numbers[1:], numbers[:-1])[0, 1]) < 0.06


def test_draw_inverts_the_cumulative_distribution() -> None:
    probabilities = torch.tensor([[0.0, 0.5, 0.0, 1.5]]).repeat(4, 1)
    uniform = torch.tensor([0.0, 0.2499, 0.25, 1 - 2.0**-48], dtype=torch.float64)
    assert draw(probabilities, uniform).tolist() == [1, 1, 3, 3]


def test_a_row_of_nan_draws_a_token_of_the_vocabulary() -> None:
    """It is flagged, but the token may already be the input of the step behind."""
    probabilities = torch.full((1, 4), float("nan"))
    assert draw(probabilities, torch.tensor([0.5], dtype=torch.float64)).tolist() == [3]


def test_draws_do_not_depend_on_the_batch() -> None:
    torch.manual_seed(0)
    logits = torch.randn(8, 100)
    params = [
        SamplingParams(seed=row % 3, temperature=0.5 + 0.1 * row, top_k=row * 7, top_p=1 - 0.05 * row)
        for row in range(8)
    ]
    params[4] = SamplingParams(temperature=0.0)
    states = [state(p) for p in params]
    positions = [3 * row for row in range(8)]
    together = sample(logits, states, positions).token_ids.tolist()
    order = [5, 2, 7, 0, 4, 1, 6, 3]
    shuffled = sample(logits[order], [states[i] for i in order], [positions[i] for i in order]).token_ids.tolist()
    alone = [int(sample(logits[i : i + 1], [states[i]], [positions[i]]).token_ids[0]) for i in range(8)]
    assert together == alone
    assert shuffled == [together[i] for i in order]
    assert together[4] == int(logits[4].argmax())


def test_requests_without_a_seed_differ_and_repeat() -> None:
    assert request_seed(0, "a") == request_seed(0, "a")
    assert len({request_seed(0, "a"), request_seed(0, "b"), request_seed(1, "a")}) == 3
    assert state(SamplingParams(), request_id="a").seed == request_seed(0, "a")
    assert state(SamplingParams(seed=7)).seed == 7


@pytest.mark.parametrize("fields", [{}, {"temperature": 0.6, "top_k": 6, "top_p": 0.95}])
def test_frequencies_follow_the_distribution(fields: dict[str, Any]) -> None:
    """Chi-square over 4,000 positions of one seed."""
    torch.manual_seed(1)
    logits, count = torch.randn(8), 4000
    made = state(SamplingParams(seed=11, **fields))
    probabilities = filtered_probabilities(logits.unsqueeze(0), [made])[0]
    expected = (probabilities / probabilities.sum() * count).tolist()
    tokens = sample(logits.repeat(count, 1), [made] * count, list(range(count))).token_ids.tolist()
    seen = Counter(tokens)
    assert all(seen[token] == 0 for token, amount in enumerate(expected) if amount == 0)
    chi_square = sum((seen[token] - amount) ** 2 / amount for token, amount in enumerate(expected) if amount > 0)
    assert chi_square < 24.3  # 7 degrees of freedom, p = 0.001


def test_nan_rows_are_flagged_and_leave_others_alone() -> None:
    logits = torch.zeros(4, 10)
    logits[:, 3] = 5.0
    logits[1, 2] = float("nan")
    logits[2, 2] = float("-inf")
    for params in (SamplingParams(temperature=0.0), SamplingParams(seed=1, temperature=0.1, top_p=0.9)):
        sampled = sample(logits, [state(params)] * 4, [0] * 4)
        assert sampled.finite.tolist() == [True, False, False, True]
        assert sampled.token_ids[[0, 3]].tolist() == [3, 3]
