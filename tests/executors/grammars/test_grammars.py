"""Whatever happens to a request on the way, what it puts out follows its grammar; its neighbours do not feel it."""

import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs
import numpy as np
import pytest
import torch

from neaptide.engine.config import CacheConfig, EngineConfig, SchedulerConfig
from neaptide.engine.params import GRAMMAR_ERROR, INTERNAL_ERROR, FinishReason, SamplingParams
from neaptide.engine.steps.plan import NewRequest
from neaptide.executors.grammar_masks import GrammarMasks
from neaptide.executors.grammar_places import Follower
from neaptide.executors.step_mask import Constrained
from neaptide.executors.torch.request_state import RequestState
from neaptide.executors.torch.sampling.logits_edits import Allowed, edit_logits
from neaptide.executors.torch.torch_executor import TorchExecutor
from neaptide.launch.serve import embedded_model_path
from neaptide.models.grammars import GrammarError, Grammars
from neaptide.server.text.tokenizer import Tokenizer
from tests.executors.driver import make_executor, write_checkpoint
from tests.executors.engine_run import EOS_TOKEN_ID, EngineRun
from tests.executors.grammars.cases import SCHEMAS, masks_fail_for, of_schema

VOCAB_SIZE = 420  # more rows than the tokenizer has tokens
BLOCK_SIZE = 4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model over the embedded tokenizer."""
    directory = tmp_path_factory.mktemp("grammars")
    write_checkpoint(directory, vocab_size=VOCAB_SIZE, max_position_embeddings=1024)
    shutil.copy(embedded_model_path() / "tokenizer.json", directory)
    return directory


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Tokenizer:
    return Tokenizer(model)


class Run(EngineRun):
    def __init__(self, model: Path, depth: int = 0, may_fail: bool = False, num_blocks: int = 512) -> None:
        self.executor: TorchExecutor = make_executor(model, num_blocks=num_blocks, block_size=BLOCK_SIZE)
        scheduler = SchedulerConfig(max_model_len=512, offline_max_kv_ratio=1.0, overlap_depth=depth)
        config = EngineConfig(cache=CacheConfig(block_size=BLOCK_SIZE), scheduler=scheduler)
        super().__init__(config, self.executor, may_fail)
        self.core.scheduler.mask_limit_s = math.inf  # none is late, however busy the machine is

    def ask(self, name: str, schema: Any, **params: Any) -> None:
        self.add(
            name,
            [9, *name.encode()],
            **{"max_tokens": 300, "ignore_eos": False, "seed": 1} | params,
            grammar=of_schema(schema),
        )

    def finish_with_preemptions(self) -> None:
        steps = 0
        while self.core.has_work:
            self.step()
            steps += 1
            running = [r for r in self.core.scheduler.queues.running_online.values() if r.num_output_tokens]
            if steps % 2 == 0 and running and not self.core.has_step_in_flight:
                self.preempt(running[steps // 2 % len(running)])


def ask_all(run: Run) -> None:
    """Every schema, greedy and drawn, beside free text."""
    for index, schema in enumerate(SCHEMAS):
        run.ask(f"{index} greedy", schema, temperature=0.0)
        run.ask(f"{index} drawn", schema, temperature=1.0)
    run.add("free", [9, 10, 11], max_tokens=30)


def assert_valid(run: Run, tokenizer: Tokenizer) -> None:
    for name, tokens in run.tokens.items():
        if name != "free":
            assert run.ends[name].finish_reason is FinishReason.STOP, tokenizer.decode(tokens)
            jsonschema_rs.validator_for(SCHEMAS[int(name[0])]).validate(json.loads(tokenizer.decode(tokens)))


# ---- through the engine ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [0, 1])
def test_what_a_random_model_says_is_valid(model: Path, tokenizer: Tokenizer, depth: int) -> None:
    run = Run(model, depth)
    ask_all(run)
    run.finish()
    assert_valid(run, tokenizer)


def test_a_preemption_every_second_step_changes_nothing(model: Path) -> None:
    calm, rough = Run(model), Run(model)
    for run in (calm, rough):
        ask_all(run)
    calm.finish()
    rough.finish_with_preemptions()
    assert sum(end.num_preemptions for end in rough.ends.values()) > 10
    assert rough.tokens == calm.tokens


def test_one_step_ahead_gives_the_same_tokens(model: Path) -> None:
    after, ahead = Run(model, depth=0), Run(model, depth=1)
    for run in (after, ahead):
        ask_all(run)
        run.finish()
    assert ahead.tokens == after.tokens


def test_steps_in_pieces_give_the_same_tokens(model: Path) -> None:
    at_once, in_pieces = Run(model), Run(model)
    in_pieces.executor._limit.lower(14)
    for run in (at_once, in_pieces):
        ask_all(run)
        run.finish()
    assert in_pieces.executor._limit.max_tokens == 7
    assert in_pieces.tokens == at_once.tokens


def test_free_text_beside_it_is_what_it_is_alone(model: Path) -> None:
    alone, beside = Run(model), Run(model)
    alone.add("free", [9, 10, 11], max_tokens=30)
    alone.finish()
    ask_all(beside)
    beside.finish()
    assert beside.tokens["free"] == alone.tokens["free"]


@pytest.mark.parametrize("depth", [0, 1])
def test_a_grammar_that_cannot_be_followed_ends_its_request_alone(
    model: Path, tokenizer: Tokenizer, depth: int
) -> None:
    run = Run(model, depth, may_fail=True)
    ask_all(run)
    run.add("9 broken", [9, 10], grammar="no grammar at all", max_tokens=9)
    run.finish()
    assert (run.ends["9 broken"].error, run.tokens.pop("9 broken")) == (GRAMMAR_ERROR, [])
    assert_valid(run, tokenizer)


def test_a_failure_of_the_mask_thread_is_taken_apart(
    model: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    masks_fail_for("0 poison", monkeypatch)
    run = Run(model, may_fail=True)
    run.ask("0 poison", SCHEMAS[0])
    ask_all(run)
    run.finish()
    assert run.ends["0 poison"].error == INTERNAL_ERROR
    del run.tokens["0 poison"]
    assert_valid(run, tokenizer)


def test_logprobs_are_those_of_the_model_before_the_grammar(model: Path) -> None:
    free, bound = Run(model), Run(model)
    free.add("a", [9, 10, 11], max_tokens=1, logprobs=5)
    free.finish()
    bound.add("a", [9, 10, 11], max_tokens=1, logprobs=5, grammar='start: "~" | "^"')
    bound.finish()
    (free_scores,), (bound_scores,) = free.logprobs["a"], bound.logprobs["a"]
    assert bound_scores.top_ids == free_scores.top_ids
    assert bound_scores.top_logprobs == free_scores.top_logprobs
    assert bound_scores.logprob < free_scores.logprob


def test_a_bias_chooses_within_the_grammar(model: Path, tokenizer: Tokenizer) -> None:
    run = Run(model)
    (wanted,) = tokenizer.encode("y")
    asked = {"max_tokens": 20, "ignore_eos": False, "temperature": 1.0, "seed": 1, "grammar": "start: /[xy]{8}/"}
    run.add("free to choose", [9, 10, 11], **asked)
    run.add("biased", [9, 10, 11], **asked, logit_bias={wanted: 100.0})
    run.finish()
    assert tokenizer.decode(run.tokens["biased"]) == "y" * 8
    assert "x" in tokenizer.decode(run.tokens["free to choose"])


def test_a_cached_prompt_changes_nothing(model: Path) -> None:
    run = Run(model)
    asked = {"max_tokens": 300, "ignore_eos": False, "temperature": 1.0, "seed": 4, "grammar": of_schema(SCHEMAS[3])}
    for name in ("first", "again"):
        run.add(name, list(range(9, 30)), **asked)
        run.finish()
    assert [run.ends[name].num_cached_tokens for name in ("first", "again")] == [0, 20]
    assert run.tokens["again"] == run.tokens["first"]


def test_ended_requests_leave_nothing_behind(model: Path) -> None:
    run = Run(model)
    ask_all(run)
    run.finish()
    run.add("last", [9, 10], max_tokens=1)  # its step tells the executor of the ends
    run.finish()
    assert run.executor._constrained == set()


# ---- one grammar -------------------------------------------------------------------------------------------------


def tokens_of(text: str, tokenizer: Tokenizer) -> np.ndarray:
    return np.array(tokenizer.encode(text), np.int32)


@pytest.fixture
def masks(model: Path) -> Iterator[GrammarMasks]:
    masks = GrammarMasks(model, VOCAB_SIZE, [EOS_TOKEN_ID])
    yield masks
    masks.close()


def allowed_next(follower: Follower, output: np.ndarray, masks: GrammarMasks) -> set[int]:
    mask = masks.fill([Constrained("a", follower, output, None)]).collect()
    assert mask.errors == {}
    return set(np.flatnonzero(np.unpackbits(mask.bits[0].view(np.uint8), bitorder="little")).tolist())


def test_an_output_that_became_shorter_or_another_is_followed_from_the_start(
    masks: GrammarMasks, tokenizer: Tokenizer
) -> None:
    grammar = 'start: "ab" ("c" | "d") | "xyz"'
    follower = Follower(grammar)
    for text in ("a", "ab", "abc", "ab", "abd", "", "x", "xy"):
        output = tokens_of(text, tokenizer)
        fresh = allowed_next(Follower(grammar), output, masks)
        assert allowed_next(follower, output, masks) == fresh, text


def test_a_follower_that_failed_follows_again(masks: GrammarMasks, tokenizer: Tokenizer) -> None:
    follower = Follower('start: "ab"')
    wrong = masks.fill([Constrained("a", follower, tokens_of("b", tokenizer), None)]).collect()
    assert wrong.errors == {"a": GRAMMAR_ERROR}
    assert allowed_next(follower, tokens_of("ab", tokenizer), masks) == {EOS_TOKEN_ID}


def test_rows_of_the_embedding_that_are_no_token_are_never_allowed(masks: GrammarMasks, tokenizer: Tokenizer) -> None:
    allowed = allowed_next(Follower("start: /(.|\\n)*/"), tokens_of("", tokenizer), masks)
    assert max(allowed) < tokenizer.vocab_size < VOCAB_SIZE


def test_special_tokens_are_no_text(masks: GrammarMasks, tokenizer: Tokenizer) -> None:
    allowed = allowed_next(Follower("start: /(.|\\n)*/"), tokens_of("", tokenizer), masks)
    assert {token for token in allowed if tokenizer.is_special(token)} == {EOS_TOKEN_ID}


def test_a_model_without_a_tokenizer_serves_no_grammars(tmp_path: Path) -> None:
    with pytest.raises(GrammarError):
        Grammars(tmp_path, VOCAB_SIZE, [EOS_TOKEN_ID])


# ---- masks -------------------------------------------------------------------------------------------------------


def _state(**fields: Any) -> RequestState:
    return RequestState(NewRequest("r", [5], SamplingParams(**fields)), (EOS_TOKEN_ID,), engine_seed=0)


@pytest.mark.parametrize("rows", [[0, 1, 2], [1]])
def test_bits_say_which_logits_stay(rows: list[int]) -> None:
    rng = np.random.default_rng(3)
    keep = rng.random((len(rows), 70)) < 0.5
    padded = np.zeros((len(rows), 96), np.uint8)
    padded[:, :70] = keep
    bits = torch.from_numpy(np.packbits(padded, bitorder="little").view(np.int32).reshape(len(rows), 3))
    logits = torch.randn(3, 70)
    before = logits.clone()
    expected = logits.clone()
    for place, row in enumerate(rows):
        expected[row, ~torch.from_numpy(keep[place])] = -torch.inf
    edited = edit_logits(logits, [_state()] * 3, [0] * 3, Allowed(rows, bits))
    assert torch.equal(edited, expected)
    assert torch.equal(logits, before)  # they are scored afterwards


def test_a_bias_brings_nothing_back_that_the_grammar_forbids() -> None:
    bits = torch.tensor([[0b0110]], dtype=torch.int32)
    state = _state(logit_bias={0: 100.0, 1: -5.0})
    edited = edit_logits(torch.zeros(1, 4), [state], [0], Allowed([0], bits))
    assert edited.tolist() == [[-torch.inf, -5.0, 0.0, -torch.inf]]


def test_penalties_weigh_what_the_grammar_leaves() -> None:
    bits = torch.tensor([[0b0110]], dtype=torch.int32)
    state = _state(frequency_penalty=0.5, presence_penalty=1.0)
    state.observe([0, 1, 1], len(state.prompt_token_ids))
    edited = edit_logits(torch.zeros(1, 4), [state], [3], Allowed([0], bits))
    assert edited.tolist() == [[-torch.inf, -2.0, 0.0, -torch.inf]]
