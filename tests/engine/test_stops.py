"""Where an output ends: to the token."""

from neaptide.engine.params import FinishReason, SamplingParams
from tests.engine.harness import Harness, online

PROMPT = [7] * 5


def text() -> list[int]:
    """What follows the prompt if nothing stops it."""
    harness = Harness()
    harness.core.handle(online("a", PROMPT, max_tokens=5))
    harness.run()
    return harness.tokens["a"]


def test_a_stop_token_counts_from_the_least_number_of_tokens_on() -> None:
    for least, length in ((2, 2), (3, 5)):
        harness = Harness()
        params = SamplingParams(max_tokens=5, min_tokens=least, stop_token_ids=(text()[2],))
        harness.core.handle(online("a", PROMPT, params=params))
        harness.run()
        assert len(harness.tokens["a"]) == length


def test_a_request_may_ignore_the_end_of_sequence() -> None:
    for ignores, length, reason in ((False, 1, FinishReason.STOP), (True, 5, FinishReason.LENGTH)):
        harness = Harness(eos_token_ids=frozenset({text()[1]}))
        harness.core.handle(online("a", PROMPT, params=SamplingParams(max_tokens=5, ignore_eos=ignores)))
        harness.run()
        assert (len(harness.tokens["a"]), harness.reason("a")) == (length, reason)
