"""The measured servers: ours with ``neaptide`` and with other policies, and vLLM's own server on vLLM's kernels."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from benchmarks.live.plan import Plan, Targets, Window
from benchmarks.live.run import run
from benchmarks.vllm_server import CPU_KV_GIB, MAX_MODEL_LEN, PRIORITY_RIVALS, Machine, Rival, run_rival
from neaptide.engine.scheduler.policies import find_policy


class RivalRun(Protocol):
    """A rival on the same kernels."""

    @property
    def name(self) -> str: ...

    async def probe(self, plan: Plan) -> list[Window]:
        """Runs online requests alone on this server, if it is not ours."""
        ...

    async def run(self, plan: Plan, targets: Targets) -> Window: ...


@dataclass(slots=True, frozen=True)
class PolicyRival:
    """Our server with another policy."""

    name: str
    flags: tuple[str, ...]

    @classmethod
    def parse(cls, text: str, engine_flags: Sequence[str] = ()) -> "PolicyRival":
        """Parses ``POLICY[@STEP_TOKENS][/SLOTS]``, such as ``priority@256/16``, with any server settings after it, such
        as ``neaptide+give-up-steps=off``.

        Raises:
            ValueError: the text is invalid; the message is one line.
        """
        rest, *settings = text.split("+")
        rest, _, seats = rest.partition("/")
        policy, _, tokens = rest.partition("@")
        try:
            find_policy(policy)
        except ValueError as error:
            raise ValueError(f"rival {text!r}: {error}") from error
        flags = ["--policy", policy]
        for flag, value in (("--max-num-batched-tokens", tokens), ("--max-num-seqs", seats)):
            if value and not (value.isdecimal() and int(value) > 0):
                raise ValueError(
                    f"rival {text!r}: {value!r} is not a positive number; use POLICY[@STEP_TOKENS][/SLOTS]"
                )
            flags += [flag, value] if value else []
        for setting in settings:
            name, sign, value = setting.partition("=")
            if not (name and sign and value):
                raise ValueError(f"rival {text!r}: {setting!r} is not a setting; use +NAME=VALUE")
            flags += [f"--{name}", value]
        return cls(text, (*engine_flags, *flags))

    async def probe(self, plan: Plan) -> list[Window]:
        return []

    async def run(self, plan: Plan, targets: Targets) -> Window:
        return await run(plan, [*self.flags, *targets.flags], online=True, offline=True)


@dataclass(slots=True, frozen=True)
class VllmRival:
    """vLLM's own server."""

    machine: Machine
    rival: Rival

    @property
    def name(self) -> str:
        return self.rival.name

    async def probe(self, plan: Plan) -> list[Window]:
        return [await run_rival(plan, self.machine, self.rival, offline=False)]

    async def run(self, plan: Plan, targets: Targets) -> Window:
        return await run_rival(plan, self.machine, self.rival, offline=True)


@dataclass(slots=True, frozen=True)
class Engine:
    """Kernels, our server on them, and the rivals on the same kernels."""

    name: str
    flags: tuple[str, ...]
    """Flags of our server."""
    rivals: tuple[RivalRun, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment of every server of this engine."""


def ours(rivals: Sequence[str], flags: Sequence[str] = ()) -> Engine:
    """Our own engine. Raises ValueError as ``PolicyRival.parse`` does.

    Args:
        flags: flags of every server.
    """
    return Engine("neaptide", tuple(flags), tuple(PolicyRival.parse(text, flags) for text in rivals))


def over_vllm(python: Path, threads: int, dtype: str) -> Engine:
    """Ours over vLLM's workers, with vLLM's own priority scheduling as rivals, at default and at small limits."""
    machine = Machine(python, threads, dtype, 128, CPU_KV_GIB, False, "cpu", MAX_MODEL_LEN)
    rivals = tuple(VllmRival(machine, rival) for rival in PRIORITY_RIVALS)
    return Engine("neaptide over vLLM", (*machine.our_flags, "--dtype", dtype), rivals, machine.environment)
