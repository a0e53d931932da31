"""Tokenizer, chats and packed rows for training neaptide-tiny (see train_tiny.py)."""

import random
import re
from dataclasses import dataclass

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from neaptide.data import skills, structured_skills

SPECIALS = ("<|pad|>", "<|bos|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
PAD, BOS, SYSTEM, USER, ASSISTANT, END = range(6)
NOTED = ("recall", "recite")
ROLE = {"system": SYSTEM, "user": USER, "assistant": ASSISTANT}
TOOL_ROLE = "<|tool|>"
CALL_MARKS = ("<tool_call>", "</tool_call>")
STRUCTURED_PIECES = (  # noqa: SIM905
    """{" ": Ġ" ", Ġ{" "}} }} "} name arguments get weather Ġweather city time Ġtime multiply set timer send message """
    "answer working ĠJSON"
).split()
"""Pieces of calls and of JSON, as the vocabulary spells them. They come after the older tokens, whose ids stay."""
SPLIT = r"\p{N}| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+"
CHAT_TEMPLATE = """{{- '<|bos|>' }}
{%- if tools %}
{{- '<|system|>Tools:' }}
{%- for tool in tools %}
{%- set parameters = (tool['function']['parameters'] or {})['properties'] or {} %}
{{- '\\n' + tool['function']['name'] + '(' + parameters | join(', ') + ')' }}
{%- endfor %}
{{- '<|end|>' }}
{%- endif %}
{%- for message in messages %}
{{- '<|' + message['role'] + '|>' + (message['content'] or '') }}
{%- for call in message['tool_calls'] or [] %}
{{- '\\n' if not loop.first else '' }}
{{- '<tool_call>\\n{"name": ' + call['function']['name'] | tojson }}
{{- ', "arguments": ' + call['function']['arguments'] | tojson + '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|assistant|>' }}
{%- endif %}
"""


def template_words(samples: int = 200, least: int = 12) -> list[str]:
    """Words that questions and answers keep using, in a fixed order.

    Letters that a skill works on must stay single, so short words and words of the word list are excluded. A word is
    kept if it has two letters and occurs in many samples of one skill.
    """
    rng = random.Random(0)
    keep: set[str] = set()
    for skill in skills.SKILLS:
        if skill == "unknown":
            continue
        seen: dict[str, int] = {}
        for _ in range(samples):
            example = skills.single(skill, rng)
            texts = [m["content"] for m in example.messages] + [example.answer]
            for word in {w for text in texts for w in re.findall(r" ?[^\W\d_]+", text)}:
                seen[word] = seen.get(word, 0) + 1
        floor = 1 if skill in skills.CLOSED else least
        keep |= {w for w, n in seen.items() if n >= floor and len(w.strip()) > 1}
    for prompt in skills.SYSTEM_PROMPTS:
        keep |= {w for w in re.findall(r" ?[^\W\d_]+", prompt) if len(w.strip()) > 1}
    return sorted(w for w in keep if w.strip() not in skills.WORDS)


def build_tokenizer() -> Tokenizer:
    """Bytes, single digits and whole template words; no merges, so nothing is learned."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [w.replace(" ", "\u0120") for w in template_words()]
    tokens = [*SPECIALS, *alphabet, *words, TOOL_ROLE, *CALL_MARKS, *STRUCTURED_PIECES]
    vocab = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in (*SPECIALS, TOOL_ROLE)])
    tokenizer.add_tokens([AddedToken(s, special=False, normalized=False) for s in CALL_MARKS])
    return tokenizer


@dataclass(slots=True)
class Chat:
    """A whole chat as tokens; `answer[i]` is n if token i belongs to the n-th answer, else 0."""

    tokens: list[int]
    answer: list[int]
    skills: list[str]


class Chats:
    """Draws training chats; `weights` steers the mix of skills."""

    def __init__(self, tokenizer: Tokenizer, rng: random.Random) -> None:
        self.tokenizer, self.rng = tokenizer, rng
        self.roles = ROLE | {"tool": tokenizer.token_to_id(TOOL_ROLE)}
        self.weights = dict.fromkeys(structured_skills.ALL, 1.0)
        self.held_out = False

    def skill(self) -> str:
        """Draws a skill by weight."""
        return self.rng.choices(list(self.weights), list(self.weights.values()))[0]

    def extend(self, chat: Chat, messages: skills.Messages, name: str) -> None:
        """Appends turns to a chat; the last one is the answer of skill `name`."""
        chat.skills.append(name)
        for message in messages:
            body = [*self.tokenizer.encode(message["content"]).ids, END]
            mark = len(chat.skills) if message is messages[-1] else 0
            chat.tokens += [self.roles[message["role"]], *body]
            chat.answer += [0, *[mark] * len(body)]

    def _system(self) -> skills.Messages:
        """Usually nothing, sometimes a system prompt, a known one or random words."""
        roll = self.rng.random()
        if roll < 0.75:
            return []
        text = self.rng.choice(skills.SYSTEM_PROMPTS)
        if roll > 0.92:
            text = skills.single("unknown", self.rng).messages[-1]["content"]
        return [{"role": "system", "content": text}]

    def _needless_tools(self) -> skills.Messages:
        """Usually nothing, sometimes functions that no question is about."""
        if self.rng.random() < 0.9:
            return []
        if self.rng.random() < 0.5:
            return structured_skills.offer(self.rng)
        text = structured_skills.offer_text(structured_skills.other_function(self.rng))
        return [{"role": "system", "content": text}]

    def single(self) -> Chat:
        """One question and its answer."""
        example = structured_skills.single(name := self.skill(), self.rng, self.held_out)
        chat = Chat([BOS], [0], [])
        context = _context(example)
        start = [] if name in NOTED else self._system()
        if name not in (*NOTED, *structured_skills.TOOL_SKILLS, "untooled"):
            start = self._needless_tools() + start
        self.extend(chat, [*context, *start, *example.messages[len(context) :], _reply(example)], name)
        return chat

    def text_shots(self, limit: int) -> Chat:
        """Solved examples in a system prompt, followed by one question."""
        name, shots = self.skill(), 1 + self.rng.randrange(max(1, limit // 40))
        while name not in skills.SKILLS:
            name = self.skill()
        while True:
            example = skills.few_shot(name, self.rng, shots, text=True)
            chat = Chat([BOS], [0], [])
            self.extend(chat, [*example.messages, _reply(example)], name)
            if len(chat.tokens) <= limit:
                return chat
            shots //= 2

    def turns(self, limit: int) -> Chat:
        """A chat of as many turns as fit, of one or several skills; notes and functions stay valid throughout."""
        name, mixed = self.skill(), self.rng.random() < 0.5
        if self.rng.random() < 0.2:
            name = self.rng.choice(NOTED)
        group = _group(name)
        context: skills.Messages = []
        start: skills.Messages = []
        chat = Chat([BOS], [0], [])
        while True:
            if mixed and chat.skills:
                name = self.rng.choice(group) if group and self.rng.random() < 0.6 else self.skill()
                if _group(name) not in ((), group) or (name == "untooled" and group):
                    continue
            example = structured_skills.ask(name, self.rng, context if name in group else None)
            own = example.messages[len(_context(example)) :]
            if not chat.skills:
                context = _context(example)
                start = context + ([] if name in NOTED else self._system())
            size = len(chat.tokens)
            self.extend(chat, [*start, *own, _reply(example)], name)
            start = []
            if len(chat.tokens) > limit:
                if len(chat.skills) == 1:
                    return self.turns(limit)
                chat.skills.pop()
                return Chat(chat.tokens[:size], chat.answer[:size], chat.skills)


def _group(skill: str) -> tuple[str, ...]:
    """Skills that share this one's context at the start of a chat; empty without a context."""
    return next((group for group in (NOTED, structured_skills.TOOL_SKILLS) if skill in group), ())


def _context(example: skills.Example) -> skills.Messages:
    """The notes or offered functions."""
    return example.messages[:1] if _group(example.skill) else []


def _reply(example: skills.Example) -> dict[str, str]:
    return {"role": "assistant", "content": example.answer}


@dataclass(slots=True)
class Batch:
    """Rows of packed chats: inputs, targets, chat numbers (0 is padding) and answer numbers.

    A token attends only to earlier tokens of its own chat. `answer` numbers the answers of the whole batch from 1, and
    `skills[n - 1]` is the skill of answer n.
    """

    inputs: np.ndarray
    targets: np.ndarray
    chat: np.ndarray
    answer: np.ndarray
    skills: list[str]


class Packer:
    """Fills rows with chats, and keeps those that did not fit for the next batch."""

    def __init__(self, chats: Chats) -> None:
        self.chats = chats
        self.waiting: list[Chat] = []

    def batch(self, rows: int, width: int, long: bool) -> Batch:
        """`rows` rows of `width` tokens: short chats, or one long chat per row followed by short ones."""
        grid = np.zeros((4, rows, width), dtype=np.int64)
        used, count = [0] * rows, [0] * rows
        out = Batch(grid[0], grid[1], grid[2], grid[3], [])

        def place(chat: Chat, row: int) -> None:
            start, size = used[row], len(chat.tokens) - 1
            end = start + size
            used[row], count[row] = end, count[row] + 1
            mark = np.array(chat.answer[1:])
            grid[0, row, start:end] = chat.tokens[:-1]
            grid[1, row, start:end] = chat.tokens[1:]
            grid[2, row, start:end] = count[row]
            grid[3, row, start:end] = np.where(mark > 0, mark + len(out.skills), 0)
            out.skills += chat.skills

        if long:
            for row in range(rows):
                text = self.chats.rng.random() < 0.2
                limit = width + 1 - (self.chats.rng.randrange(width // 2) if row % 2 else 0)
                place(self.chats.text_shots(limit) if text else self.chats.turns(limit), row)
        misses, kept = 0, []
        while misses < 60:
            chat = self.waiting.pop() if self.waiting else self.chats.single()
            fits = (r for r in range(rows) if used[r] + len(chat.tokens) - 1 <= width)
            row = next(fits, None)
            if row is None:
                misses += 1
                if len(chat.tokens) <= min(width, 128):
                    kept.append(chat)
            else:
                place(chat, row)
        self.waiting = kept
        return out
