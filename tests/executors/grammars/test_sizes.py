"""Tokenizers larger and smaller than the vocabulary: masks fit the embedding table."""

import json
from pathlib import Path

import numpy as np
import pytest

from neaptide.executors.grammar_pool import MatcherPool
from neaptide.launch.serve import embedded_model_path
from neaptide.models.grammars import GrammarError, Grammars

NUM_TOKENS = 416
END = 5


@pytest.mark.parametrize("vocab_size", [400, NUM_TOKENS, 420, 600])
def test_a_mask_has_a_bit_for_each_row_of_the_table(vocab_size: int) -> None:
    grammars = Grammars(embedded_model_path(), vocab_size, [END, vocab_size - 1])
    num_words = -(-vocab_size // 32)
    grammar = json.dumps({"grammars": [{"json_schema": {"type": "boolean"}}]})
    (bits,), _ = MatcherPool(grammars, 1).mask([grammars.compile(grammar)], num_words)
    assert bits.shape == (num_words,)
    allowed = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little"))
    assert 0 < len(allowed) < 10
    assert allowed.max() < min(vocab_size, NUM_TOKENS)


def test_a_model_without_an_end_has_no_grammars() -> None:
    with pytest.raises(GrammarError, match="no file of the model names an end token"):
        Grammars(embedded_model_path(), NUM_TOKENS, [])


def test_a_model_without_a_tokenizer_has_no_grammars(tmp_path: Path) -> None:
    with pytest.raises(GrammarError, match=r"tokenizer\.json"):
        Grammars(tmp_path, NUM_TOKENS, [END])
