"""Tenants of a small pool, on a memory that knows which request's token stands in every slot."""

from dataclasses import dataclass, field

from neaptide.engine.kv.block_pool import BlockPool
from neaptide.engine.kv.pool_draft import BlockPoolDraft
from neaptide.engine.kv.slot_copies import SlotRun
from neaptide.engine.params import SamplingParams, Tier
from neaptide.engine.request import Request
from neaptide_lab.two_tenants.blocks import NOWHERE, TenantCopies, TwoTenants

SIZE = 4
"""Slots of a block."""
Token = tuple[str, int]
Slot = tuple[int, int]


def request(name: str) -> Request:
    """An offline one if the name is in small letters, as in the paper's figure 9."""
    tier = Tier.DEFAULT if name.isupper() else Tier.BATCH
    return Request(name, [0], SamplingParams(max_tokens=1), tier, 0.0)


@dataclass
class Bench:
    num_blocks: int = 6
    num_host_blocks: int = 4
    num_tokens: dict[Request, int] = field(default_factory=dict)
    """Computed by each tenant."""
    lacking: dict[Request, int] = field(default_factory=dict)
    """What each will compute in this step."""
    device: dict[Slot, Token] = field(default_factory=dict)
    host: dict[Slot, Token] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.pool = BlockPool(self.num_blocks)
        self.tenants = TwoTenants(self.pool, self.num_blocks, SIZE, self.num_host_blocks, self._lacks)

    def _lacks(self, one: Request) -> int:
        return self.lacking.get(one, 0)

    def start(self, name: str) -> Request:
        one = request(name)
        self.tenants.add(one)
        self.num_tokens[one] = 0
        return one

    def step(self, *parts: tuple[Request, int]) -> TenantCopies:
        """Each that finds room computes so many tokens; raises AssertionError if one reads what is not its own."""
        self.tenants.begin()
        self.lacking = dict(parts)
        pool = BlockPoolDraft(self.pool)
        draft = self.tenants.fork(pool, self._lacks)
        scheduled_rows = []
        for one, count in parts:
            start = self.num_tokens[one]
            spare = draft.num_preemptible() if one.is_online else 0
            if draft.blocks_needed(one, start, count) <= pool.num_available + spare:
                draft.grow(one, start, count)
                scheduled_rows.append((one, count))
        foretold = {one: draft.held(one) for one in self.num_tokens}
        for one, count in scheduled_rows:
            self.tenants.grow(one, self.num_tokens[one], count)
        assert foretold == {one: self.tenants.held(one) for one in self.num_tokens}
        copies = self.tenants.take_copies()
        assert draft.copies == copies
        self.copy(copies)
        for one, count in scheduled_rows:
            self._compute(one, count)
        self.lacking = {}
        self.check()
        return copies

    def swap_out(self, one: Request) -> TenantCopies:
        self.tenants.begin()
        self.tenants.swap_out(one)
        copies = self.tenants.take_copies()
        self.copy(copies)
        self.check()
        return copies

    def end(self, one: Request) -> None:
        self.tenants.remove(one)
        del self.num_tokens[one]
        self.check()

    def copy(self, copies: TenantCopies) -> None:
        def content(memory: dict[Slot, Token], runs: list[SlotRun]) -> dict[Slot, Token]:
            return {(run.target, slot): memory[run.source, slot] for run in runs for slot in range(run.first, run.end)}

        self.host |= content(self.device, copies.saves)
        self.device |= content(self.device, copies.moves)
        self.device |= content(self.host, copies.restores)

    def slot(self, one: Request, position: int) -> Slot:
        tenant = self.tenants.tenant(one)
        assert tenant is not None
        block, offset = tenant.blocks[position // SIZE], position % SIZE
        assert block != NOWHERE
        return block, offset if one.is_online else SIZE - 1 - offset

    def _compute(self, one: Request, count: int) -> None:
        start = self.num_tokens[one]
        for position in range(start):
            assert self.device[self.slot(one, position)] == (one.request_id, position)
        for position in range(start, start + count):
            self.device[self.slot(one, position)] = one.request_id, position
        self.num_tokens[one] = start + count

    def check(self) -> None:
        self.tenants.check_integrity()
        self.pool.check_integrity([(one.request_class, self.tenants.held(one)) for one in self.num_tokens])
