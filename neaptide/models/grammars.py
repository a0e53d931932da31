"""Grammars over a model's tokens: which tokens may come next so that the whole output follows the grammar.

The server compiles a grammar, in a subprocess that may be killed, to check it against limits. The engine compiles it
again to follow it, with the same vocabulary and limits, so a checked grammar also passes there.
"""

import json
import time
from collections.abc import Sequence
from pathlib import Path

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from neaptide.models.fields import MAX_TOKENIZER_BYTES, read_text

TOKENIZER_FILE = "tokenizer.json"
MAX_ITEMS_IN_ROW = 2_000
INITIAL_LEXER_FUEL = 1_000_000
STEP_LEXER_FUEL = 200_000
STEP_MAX_ITEMS = 50_000
MAX_LEXER_STATES = 50_000
MAX_GRAMMAR_SIZE = 500_000
"""Limits in the library's own units. Together they bound a compilation to tens of milliseconds and a mask to about
forty."""
MAX_MASK_S = 0.1
"""Longest processor time of a first mask that the check accepts."""
TOO_SLOW = "too complex: computing the first allowed tokens takes too long"
NO_OUTPUT = "Unsatisfiable: no token may begin the output"
_NOTHING_NEXT = "NoExtensionBias"
"""The library's message if no token can follow."""


_UNFORCED = '%llguidance {"no_forcing": true}\n'
"""Turns off forcing. With it, text that the grammar forces is tokenized ahead, which for every mask takes time in
proportion to the text."""


class GrammarError(ValueError):
    """The grammar is invalid or exceeds the limits. The message is the library's and may quote the caller."""


class Grammars:
    """Compiles grammars over the tokens of one model.

    Args:
        directory: of the model; its ``tokenizer.json`` is read.
        vocab_size: rows of the embedding table. Rows without a token are never allowed.
        eos_token_ids: any of them may end a complete output.

    Raises:
        GrammarError: the model has no tokenizer, or its tokens are not known to be bytes.
    """

    def __init__(self, directory: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        if not eos_token_ids:
            raise GrammarError("no file of the model names an end token")
        try:
            text = read_text(directory / TOKENIZER_FILE, MAX_TOKENIZER_BYTES)
            self.tokenizer = _tokenizer(text, vocab_size, eos_token_ids)
        except (OSError, ValueError) as error:
            raise GrammarError(f"the tokenizer does not support grammars: {error}") from error
        self.vocab_size = vocab_size
        self.num_words = -(-self.tokenizer.vocab_size // 32)
        """Words of the library's masks, which may go on behind the embedding table's rows."""
        self._limits = LLParserLimits(
            max_items_in_row=MAX_ITEMS_IN_ROW,
            initial_lexer_fuel=INITIAL_LEXER_FUEL,
            step_lexer_fuel=STEP_LEXER_FUEL,
            step_max_items=STEP_MAX_ITEMS,
            max_lexer_states=MAX_LEXER_STATES,
            max_grammar_size=MAX_GRAMMAR_SIZE,
        )

    def check(self, grammar: str) -> None:
        """Compiles a grammar and computes its first mask.

        Raises:
            GrammarError: it does not compile, allows no output, or takes too long three times.
        """
        compiled = self.compile(grammar)
        for _ in range(3):
            matcher, start_s = compiled.deep_copy(), time.thread_time()
            can_begin = any(matcher.compute_bitmask())
            if time.thread_time() - start_s <= MAX_MASK_S:
                break
        else:
            raise GrammarError(TOO_SLOW)
        complaint, _, _ = matcher.get_error().partition("\n")  # the rest of the message is the parser's state
        if complaint and complaint != _NOTHING_NEXT:
            raise GrammarError(complaint)
        if complaint or not can_begin:
            raise GrammarError(NO_OUTPUT)

    def compile(self, grammar: str) -> LLMatcher:
        """A matcher before the first token.

        Raises:
            GrammarError: it does not compile.
        """
        matcher = LLMatcher(self.tokenizer, _unforced(grammar), log_level=0, limits=self._limits)
        if matcher.is_error():
            raise GrammarError(matcher.get_error())
        return matcher


def _tokenizer(text: str, vocab_size: int, eos_token_ids: Sequence[int]) -> LLTokenizer:
    """The library's tokenizer. Tokens and rows of the embedding table need not be equally many: fine-tunes add tokens
    that the model never learned, and tables are padded.

    Raises:
        ValueError: the library cannot use the tokenizer.
    """
    try:
        return LLTokenizer(text, n_vocab=vocab_size, eos_token=list(eos_token_ids))
    except ValueError:
        spec = json.loads(text)
        vocab, added = spec["model"].get("vocab", ()), spec.get("added_tokens") or ()
        ids = vocab.values() if isinstance(vocab, dict) else range(len(vocab))
        num_tokens = 1 + max([*ids, *(token["id"] for token in added)])
        ends = [token for token in eos_token_ids if token < num_tokens]
        return LLTokenizer(text, n_vocab=max(vocab_size, num_tokens), eos_token=ends)


def _unforced(grammar: str) -> str:
    """The same grammar without forcing, so that a mask's cost depends on one step's tokens and not on the text ahead.

    With forcing, the compiler follows the text as long as there is no choice. It keeps a state for every byte and
    tokenizes all of it to allow its first token. Without it, every token that the text begins with is allowed, and the
    model chooses.
    """
    if not grammar.lstrip().startswith("{"):
        return _UNFORCED + grammar
    try:
        parts = json.loads(grammar)
        first = parts["grammars"][0]
        name = first.setdefault("name", "unforced_start")
        parts["grammars"].insert(0, {"name": "", "lark_grammar": f"{_UNFORCED}start: @{name}\n"})
    except (ValueError, LookupError, TypeError, AttributeError):
        return grammar  # the compiler will report the error
    return json.dumps(parts, ensure_ascii=False)
