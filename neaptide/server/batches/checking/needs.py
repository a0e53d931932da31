"""Abilities that lines need of a server, computed from their rows. Blocking; for a thread."""

from collections.abc import Sequence

import numpy as np

from neaptide.engine.arrays import IntArray
from neaptide.engine.offline.token_file import TokenFile
from neaptide.server.batches.checking.job_files import JobPlan
from neaptide.server.batches.served import Served
from neaptide.server.batches.storing.models import PendingLine


def needed_tokens(lines: Sequence[PendingLine], plan: JobPlan, tokens: TokenFile) -> IntArray:
    """[lines] context length that each needs: tokens of its longest row, prompt and answer."""
    needed = np.zeros(len(lines), np.int64)
    index_of_row = np.repeat(np.arange(len(lines)), [line.num_rows for line in lines])
    prompts, limits = row_lengths(lines, plan, tokens)
    np.maximum.at(needed, index_of_row, prompts + limits)
    return needed


def lacks(served: Served, lines: Sequence[PendingLine], plan: JobPlan, tokens: TokenFile) -> str | None:
    """The ability that this server lacks for some of the lines; None if it can run all of them."""
    abilities = served.abilities
    longest = int(needed_tokens(lines, plan, tokens).max(initial=0))
    if longest > abilities.max_model_len:
        return f"a line takes {longest} tokens, max_model_len is {abilities.max_model_len} here"
    for params in (plan.params_table[index] for index in {plan.params_index[row] for row in _rows(lines)}):
        if params.grammar and not abilities.follows_grammars:
            return "a line asks for structured output, which the executor here does not enforce"
        ends = {*params.stop_token_ids, *(() if params.ignore_eos else served.eos_token_ids)}
        if params.min_tokens and abilities.max_masked_ends is not None and len(ends) > abilities.max_masked_ends:
            return f"a line with min_tokens has {len(ends)} stop tokens, there may be {abilities.max_masked_ends} here"
    return None


def _rows(lines: Sequence[PendingLine]) -> list[int]:
    return [row for line in lines for row in range(line.first_row, line.first_row + line.num_rows)]


def row_lengths(lines: Sequence[PendingLine], plan: JobPlan, tokens: TokenFile) -> tuple[IntArray, IntArray]:
    """[rows] prompt tokens, and maximum answer tokens."""
    rows = np.array(_rows(lines), np.int64)
    limits = np.array([plan.params_table[plan.params_index[row]].max_tokens for row in rows.tolist()], np.int64)
    return tokens.lengths(rows), limits
