"""An executor that says what a script has: what real models write, without a model.

``script.json`` in the model's directory is a list of ``{"after": TEXT, "say": TEXT}``. An output is the ``say`` of the
entry whose ``after`` stands last in the prompt; an empty ``after`` stands at its start. Then the output ends.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from neaptide.engine.clock import Clock
from neaptide.engine.interfaces import CostModel
from neaptide.executors.simulated.hash_executor import SimExecutor

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SCRIPT_FILE = "script.json"


def is_scripted(executor: str, model_path: Path) -> bool:
    """Whether this executor says what a script has."""
    return executor == "sim" and (model_path / SCRIPT_FILE).is_file()


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One output."""

    after: str
    say: str


class Script:
    """Outputs of a model, as tokens of its tokenizer."""

    def __init__(self, entries: Sequence[Entry], tokenizer: "Tokenizer", eos_token_id: int) -> None:
        self._entries, self._tokenizer = entries, tokenizer
        self._outputs = [
            [*tokenizer.encode(entry.say, add_special_tokens=False).ids, eos_token_id] for entry in entries
        ]

    @classmethod
    def load(cls, directory: Path, eos_token_id: int) -> "Script":
        """Reads a model's script. Raises ValueError if it is malformed."""
        try:
            entries = msgspec.convert(json.loads((directory / SCRIPT_FILE).read_bytes()), list[Entry])
        except (ValueError, msgspec.ValidationError) as error:
            raise ValueError(f"{SCRIPT_FILE} cannot be read: {error}") from error
        if not entries:
            raise ValueError(f"{SCRIPT_FILE} has no entry")
        from tokenizers import Tokenizer  # Only for a script: the engine's interpreter may lack it.

        return cls(entries, Tokenizer.from_file(str(directory / "tokenizer.json")), eos_token_id)

    def choose(self, prompt_token_ids: Sequence[int]) -> int:
        """Index of the entry that follows the prompt; the first one if none does."""
        text = self._tokenizer.decode(list(prompt_token_ids), skip_special_tokens=False)
        places = [text.rfind(entry.after) if entry.after else 0 for entry in self._entries]
        return max(range(len(places)), key=lambda index: (places[index], -index))

    def token(self, entry: int, position: int) -> int:
        """The token at a position of an output; its end after the last one."""
        output = self._outputs[entry]
        return output[min(position, len(output) - 1)]


class ScriptedExecutor(SimExecutor):
    """A simulated executor whose outputs are a script's."""

    def __init__(self, num_blocks: int, cost_model: CostModel, clock: Clock, vocab_size: int, script: Script) -> None:
        super().__init__(num_blocks, cost_model, clock, vocab_size)
        self._script = script

    def remember(self, prompt_token_ids: Sequence[int]) -> int:
        return self._script.choose(prompt_token_ids)

    def token(self, prompt: int, output_position: int) -> int:
        return self._script.token(prompt, output_position)
