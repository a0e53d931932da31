"""Grammars over a model's tokens: which tokens may come next, so that the whole output follows one.

The edge compiles a grammar to find out whether it can be held (in a process that may be killed), the engine compiles
it again to follow it: both with the same vocabulary and the same limits, so that what passed there passes here.
"""

import json
import time
from collections.abc import Sequence
from pathlib import Path

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

TOKENIZER_FILE = "tokenizer.json"
MAX_ITEMS_IN_ROW = 2_000
INITIAL_LEXER_FUEL = 1_000_000
STEP_LEXER_FUEL = 200_000
STEP_MAX_ITEMS = 50_000
MAX_LEXER_STATES = 50_000
MAX_GRAMMAR_SIZE = 500_000
"""The library's own units; together they bound a compilation to tens of milliseconds and a mask to about forty."""
MAX_MASK_S = 0.1
"""Longest processor time of a first mask that the check accepts."""
TOO_SLOW = "too complex: what may come first takes too long to find out"
NO_OUTPUT = "Unsatisfiable: no token may begin the output"
_NOTHING_NEXT = "NoExtensionBias"
"""The library's word for it."""


_UNFORCED = '%llguidance {"no_forcing": true}\n'
"""Text that a grammar forces is not tokenized ahead: that would take as long as the text is, for every mask."""


class GrammarError(ValueError):
    """No grammar, or one that is beyond the limits; the library's words, which may quote the caller."""


class Grammars:
    """Compiles grammars over the tokens of one model.

    Args:
        directory: of the model; its ``tokenizer.json`` is read.
        vocab_size: rows of the embedding table; those that no token of the tokenizer has are never allowed.
        eos_token_ids: any of them may end an output that is complete.

    Raises:
        GrammarError: the tokenizer is of a kind whose tokens are not known to be bytes, or there is none.
    """

    def __init__(self, directory: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        try:
            text = (directory / TOKENIZER_FILE).read_text(encoding="utf-8")
            self.tokenizer = LLTokenizer(text, n_vocab=vocab_size, eos_token=list(eos_token_ids))
        except (OSError, ValueError) as error:
            raise GrammarError(f"the tokenizer serves no grammars: {error}") from error
        self.vocab_size = vocab_size
        self._limits = LLParserLimits(
            max_items_in_row=MAX_ITEMS_IN_ROW,
            initial_lexer_fuel=INITIAL_LEXER_FUEL,
            step_lexer_fuel=STEP_LEXER_FUEL,
            step_max_items=STEP_MAX_ITEMS,
            max_lexer_states=MAX_LEXER_STATES,
            max_grammar_size=MAX_GRAMMAR_SIZE,
        )

    def check(self, grammar: str) -> None:
        """Compiles a grammar and looks for its first token.

        Raises:
            GrammarError: it cannot be compiled, lets no output begin, or takes too long for that, three times.
        """
        compiled = self.compile(grammar)
        for _ in range(3):
            matcher, start_s = compiled.deep_copy(), time.thread_time()
            can_begin = any(matcher.compute_bitmask())
            if time.thread_time() - start_s <= MAX_MASK_S:
                break
        else:
            raise GrammarError(TOO_SLOW)
        complaint, _, _ = matcher.get_error().partition("\n")  # the rest tells the parser's state
        if complaint and complaint != _NOTHING_NEXT:
            raise GrammarError(complaint)
        if complaint or not can_begin:
            raise GrammarError(NO_OUTPUT)

    def compile(self, grammar: str) -> LLMatcher:
        """A matcher before the first token.

        Raises:
            GrammarError: it cannot be compiled.
        """
        matcher = LLMatcher(self.tokenizer, _unforced(grammar), log_level=0, limits=self._limits)
        if matcher.is_error():
            raise GrammarError(matcher.get_error())
        return matcher


def _unforced(grammar: str) -> str:
    """The same grammar, whose masks cost what the tokens of one step do, however long the text ahead of them is.

    With forcing, the compiler follows the text for as long as there is no choice, keeps a state for every byte of it,
    and tokenizes it all to allow its first token. Without, every token that the text begins with is allowed, and the
    model chooses among them.
    """
    if not grammar.lstrip().startswith("{"):
        return _UNFORCED + grammar
    try:
        parts = json.loads(grammar)
        first = parts["grammars"][0]
        name = first.setdefault("name", "unforced_start")
        parts["grammars"].insert(0, {"name": "", "lark_grammar": f"{_UNFORCED}start: @{name}\n"})
    except (ValueError, LookupError, TypeError, AttributeError):
        return grammar  # the compiler says what is wrong with it
    return json.dumps(parts, ensure_ascii=False)
