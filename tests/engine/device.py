"""A fake device: it runs steps in order of submission, keeps a KV cache that knows which text stands in every slot, and
fills placeholders with what it sampled itself."""

from array import array
from zlib import crc32

from neaptide.engine.kv.block_table import REVERSED
from neaptide.engine.kv.slot_copies import SlotCopies, SlotRun
from neaptide.engine.params import NUMERICAL_ERROR
from neaptide.engine.steps.plan import ScheduledRequest, StepPlan, StepResult
from neaptide.engine.table import PLACEHOLDER_TOKEN_ID
from neaptide.executors.simulated.hash_executor import SimExecutor, SimHandle, simulated_token
from tests.engine.harness import Harness

VOCAB_SIZE = 1000
"""Of the harness."""
WRONG_TOKEN = 1
"""Made from KV that is not the request's own text; the simulated executor makes none below 6."""
NAN, GARBAGE = -1, -2


def text_of(prompt: list[int], num_tokens: int) -> list[int]:
    """What the simulated executor answers."""
    crc = crc32(array("i", prompt).tobytes())
    return [simulated_token(crc, position, VOCAB_SIZE, 6) for position in range(num_tokens)]


class FailedHandle:
    """Of a step that takes its time and then raises."""

    def __init__(self, inner: SimHandle) -> None:
        self._inner = inner

    def wait(self) -> StepResult:
        self._inner.wait()
        raise RuntimeError("poisoned")


class FakeDevice:
    """Implements ``Executor``: times and tokens of the simulated one, faults as told.

    raises: requests with which a step raises, and the tokens from which on.
    raises_in_wait: the step's handle raises, not its submission, and the step has written nothing.
    is_deaf: a submission that raises has heard nothing of what the plan says.
    not_a_number: requests that write NaN, in all slots of their part, and the tokens from which on. They report it
        where they sample, and so do others that read it.
    """

    def __init__(self, inner: SimExecutor, block_size: int) -> None:
        self._inner = inner
        self._block_size = block_size
        self.raises: dict[str, int] = {}
        self.raises_in_wait = False
        self.is_deaf = False
        self.not_a_number: dict[str, int] = {}
        self.texts: dict[str, list[int]] = {}
        """Prompt and output of the requests that it knows."""
        self._slots: dict[tuple[int, int], int] = {}
        """What stands in each slot: a hash of the text up to there."""
        self._host: dict[int, list[int | None]] = {}
        """What stands in each block of host memory."""
        self.num_saved = self.num_loaded = 0
        self.num_slots_saved = self.num_slots_moved = self.num_slots_restored = 0
        self._sampling: set[str] = set()
        """Requests that sampled in the step submitted last."""
        self._has_failed = False
        """The step submitted last."""
        self.num_submitted = 0
        self.num_placeholders = 0
        self.wrong_inputs: list[str] = []
        """Requests with an input token that is not of their text."""
        self.wrong_reads: list[str] = []
        """Requests that read KV of something else."""

    @property
    def num_blocks(self) -> int:
        return self._inner.num_blocks

    def submit(self, plan: StepPlan) -> SimHandle | FailedHandle:
        self.num_submitted += 1
        parts = plan.scheduled
        is_poisoned = any(self._is_due(part, self.raises) for part in parts)
        if is_poisoned and not self.raises_in_wait and self.is_deaf:
            self._has_failed = True
            raise RuntimeError("poisoned")
        self._copy(plan)
        for request_id in plan.finished_ids:
            self.texts.pop(request_id, None)
        for new in plan.new_requests:
            self.texts[new.request_id] = list(new.prompt_token_ids)
        handle = self._inner.submit(plan)
        if is_poisoned:
            self._has_failed, self._sampling = True, set()
            if not self.raises_in_wait:
                raise RuntimeError("poisoned")
            return FailedHandle(handle)
        inputs = [self._is_input_known(part) for part in parts]
        self._sampling = {part.request_id for part in parts if part.sample}
        self._has_failed = False
        for index, (part, is_known) in enumerate(zip(parts, inputs, strict=True)):
            self._run(part, is_known, index, handle.result)
        return handle

    def close(self) -> None:
        self._inner.close()

    def _copy(self, plan: StepPlan) -> None:
        self.num_saved += len(plan.saves)
        self.num_loaded += len(plan.loads)
        offsets = range(self._block_size)
        for block, slot in plan.saves:
            self._host[slot] = [self._slots.get((block, offset)) for offset in offsets]
        for slot, block in plan.loads:
            for offset, content in zip(offsets, self._host[slot], strict=True):
                if content is not None:
                    self._slots[block, offset] = content
        if plan.slot_copies is not None:
            self._copy_slots(plan.slot_copies)

    def _copy_slots(self, copies: SlotCopies) -> None:
        self.num_slots_saved += copies.num_saved
        self.num_slots_moved += copies.num_moved
        self.num_slots_restored += copies.num_restored
        for run in copies.saves:
            host = self._host.setdefault(run.target, [None] * self._block_size)
            for slot in range(run.first, run.end):
                host[slot] = self._slots.get((run.source, slot))
        moved = [
            (run.target, slot, self._slots.get((run.source, slot))) for run in copies.moves for slot in slots_of(run)
        ]
        restored = [
            (run.target, slot, self._host[run.source][slot]) for run in copies.restores for slot in slots_of(run)
        ]
        for block, slot, content in moved + restored:
            if content is not None:
                self._slots[block, slot] = content

    def _is_due(self, part: ScheduledRequest, faults: dict[str, int]) -> bool:
        least = faults.get(part.request_id)
        return least is not None and part.num_computed_tokens + len(part.token_ids) >= least

    def _is_input_known(self, part: ScheduledRequest) -> bool:
        """Compares the part's tokens with the request's text. False if a failed step should have sampled the last."""
        text = self.texts[part.request_id]
        start, tokens = part.num_computed_tokens, list(part.token_ids)
        if tokens[-1] == PLACEHOLDER_TOKEN_ID:
            self.num_placeholders += 1
            if self._has_failed:
                return False
            if start + len(tokens) == len(text) and part.request_id in self._sampling:
                tokens[-1] = text[-1]
        if tokens != text[start : start + len(tokens)]:
            self.wrong_inputs.append(part.request_id)
        return True

    def _run(self, part: ScheduledRequest, is_known: bool, index: int, result: StepResult) -> None:
        start, end = part.num_computed_tokens, part.num_computed_tokens + len(part.token_ids)
        crc, chain = 0, []
        text = self.texts[part.request_id]
        for token in text[:end]:
            crc = crc32(token.to_bytes(4, "little"), crc)
            chain.append(crc)
        slots = [self._slot(part.block_ids[p // self._block_size], p % self._block_size) for p in range(end)]
        context = [self._slots.get(slot) for slot in slots[:start]]
        fault = None
        if self._is_due(part, self.not_a_number) or NAN in context:
            fault = NAN
            if part.sample:
                result.errors[part.request_id] = NUMERICAL_ERROR
        elif not is_known or context != chain[:start]:
            fault = GARBAGE
            if is_known:
                self.wrong_reads.append(part.request_id)
            result.token_ids[index] = WRONG_TOKEN
        for position in range(start, end):
            self._slots[slots[position]] = chain[position] if fault is None else fault
        if part.sample and is_known:
            text[end:] = [int(result.token_ids[index])]

    def _slot(self, entry: int, offset: int) -> tuple[int, int]:
        if entry < REVERSED:
            return entry, offset
        return entry - REVERSED, self._block_size - 1 - offset


def slots_of(run: SlotRun) -> range:
    return range(run.first, run.end)


def on_device(**fields: object) -> tuple[Harness, FakeDevice]:
    """An engine on a fake device, with steps in flight."""
    harness = Harness(**({"overlap_depth": 1} | fields))  # type: ignore[arg-type]
    device = FakeDevice(harness.executor, harness.core.kv.block_size)
    harness.core._executor._executor = device
    return harness, device
