"""Text from tokens: the same whatever the split, whole characters only, stop strings exact."""

from hypothesis import given, settings
from hypothesis import strategies as st

from neaptide.engine.messages import RequestOutput
from neaptide.engine.params import FinishReason
from neaptide.server.openai.endpoints import COMPLETIONS
from neaptide.server.openai.prepare import prepare
from neaptide.server.openai.respond import ResponseAssembler
from neaptide.server.text.detokenizer import IncrementalDecoder, StopScanner
from neaptide.server.text.tokenizer import Tokenizer
from tests.server.conftest import MODEL_DIR, make_context

TOKENIZER = Tokenizer(MODEL_DIR)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=30) | st.text("ab é€😀", max_size=30)
TOKENS = st.lists(st.integers(0, 415), max_size=40) | TEXT.map(TOKENIZER.encode)
STOPS = st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=4)


@given(TOKENS)
def test_incremental_equals_whole(ids: list[int]) -> None:
    decoder = IncrementalDecoder(TOKENIZER)
    text = "".join(map(decoder.push, ids)) + decoder.flush()
    assert text == TOKENIZER.decode(ids, skip_special_tokens=True)


@given(TEXT)
def test_valid_text_never_shows_a_replacement_character(text: str) -> None:
    decoder = IncrementalDecoder(TOKENIZER, skip_special_tokens=False)
    pieces = [decoder.push(token_id) for token_id in TOKENIZER.encode(text, add_special_tokens=False)]
    assert "".join(pieces) == text
    assert sum(piece.count("\ufffd") for piece in pieces) == text.count("\ufffd")


def test_special_tokens_that_are_shown_are_marks_of_calls() -> None:
    decoder = IncrementalDecoder(TOKENIZER, shown_ids={2, 4})
    assert [decoder.push(token_id) for token_id in (2, 3, 4)] == ["<|system|>", "", "<|assistant|>"]


def _first_stop(text: str, stops: list[str]) -> int | None:
    """Where the output has to end, found by looking at one more character at a time."""
    for end in range(len(text) + 1):
        begins = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if begins:
            return min(begins)
    return None


@given(st.text("abc", max_size=40), STOPS, st.lists(st.integers(0, 5), max_size=40))
@settings(max_examples=300)
def test_stop_strings_do_not_depend_on_the_split(text: str, stops: list[str], sizes: list[int]) -> None:
    scanner = StopScanner(stops)
    shown, place = "", 0
    for size in [*sizes, len(text)]:
        shown += scanner.push(text[place : place + size])
        place += size
        # Nothing is shown that has to be taken back.
        assert text.startswith(shown)
    if scanner.matched is None:
        shown += scanner.release()
    expected = _first_stop(text, stops)
    assert shown == (text if expected is None else text[:expected])


@given(TOKENS, st.lists(st.integers(1, 7), max_size=40), st.booleans(), st.sampled_from([(), ("a",), ("é€", "b ")]))
@settings(max_examples=150)
def test_deltas_add_up_to_the_body(ids: list[int], sizes: list[int], echo: bool, stop: tuple[str, ...]) -> None:
    body = {"prompt": "say", "max_tokens": 100, "stop": list(stop), "echo": echo, "logprobs": None}
    prepared = prepare(COMPLETIONS, body, make_context(TOKENIZER))
    texts = []
    for splits in ([1] * len(ids), sizes):
        assembler = ResponseAssembler.of(prepared)
        shown, place = "", 0
        for size in [*splits, len(ids)]:
            last = place + size >= len(ids)
            reason = FinishReason.STOP if last else None
            shown += assembler.feed(0, RequestOutput("x", ids[place : place + size], finish_reason=reason)).text
            place += size
            if last:
                break
        assert assembler.finished
        assert shown == assembler.body("x")["choices"][0]["text"]
        texts.append((shown, assembler.usage()["completion_tokens"]))
    assert texts[0] == texts[1]


def test_first_min_tokens_cannot_stop() -> None:
    ids = TOKENIZER.encode("aaaa")
    context = make_context(TOKENIZER)
    prepared = prepare(COMPLETIONS, {"prompt": "x", "max_tokens": 9, "min_tokens": 2, "stop": ["a"]}, context)
    assembler = ResponseAssembler.of(prepared)
    assembler.feed(0, RequestOutput("x", ids))
    assert assembler.body("x")["choices"][0]["text"] == "aa"
    assert assembler.stop_hit == [True]
