"""One round of harm: a batch is at some moment of its life, one thing on the disk is away, older, cut or flipped, and
comes back or does not. What must hold afterwards is the same for all (``Round.violations``)."""

import asyncio
import contextlib
import random
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

from neaptide.server.batches.checking.validate import Check, CheckReport, Keep
from neaptide.server.batches.mending.repair import repair
from neaptide.server.batches.running import finalize
from neaptide.server.batches.storing.data_dir import DATABASE_NAME, StoreError
from neaptide.server.batches.storing.models import BatchRecord
from neaptide.server.batches.storing.store import Store, StoreUnavailableError
from neaptide.server.http.errors import ApiError
from tests.patience import until
from tests.server.batches.fake_compiler import FakeCompiler
from tests.server.batches.fakes import Server, ThreadChecker, numbered

OBJECTS = ("input", "plan", "tokens", "offsets", "sha256", "database", "log", "results", "everything")
MOMENTS = ("before", "checking", "running", "finalizing", "complete")
HARMS = ("away", "older", "cut", "flipped")
REMEDIES = ("comes back at once", "is put back", "is given up")
PLAN = ("plan", "tokens", "offsets", "sha256")
NUM_LINES = 12
SHORT_S = 0.03
"""How long a server goes on with what was done to it."""
LONG_S = 60.0
"""For a batch that has to end. On a busy machine; else it takes a tenth of a second."""


@dataclass(frozen=True)
class Plot:
    """What happens in a round."""

    thing: str
    harm: str
    moment: str
    remedy: str
    is_live: bool
    """Done while the server runs."""
    is_killed: bool
    """Otherwise: the server was killed before, and not stopped."""

    @classmethod
    def drawn(cls, seed: int) -> "Plot":
        """Every thing comes as often as any other, and with every harm at every moment that it knows."""
        thing, turn = OBJECTS[seed % len(OBJECTS)], seed // len(OBJECTS)
        all_of_it = [cls(thing, *rest) for rest in product(HARMS, MOMENTS, REMEDIES, (True, False), (True, False))]
        possible = [plot for plot in all_of_it if plot._can_be]
        harms = [harm for harm in HARMS if any(plot.harm == harm for plot in possible)]
        moments = [moment for moment in MOMENTS if any(plot.moment == moment for plot in possible)]
        harm, moment = harms[turn % len(harms)], moments[turn % len(moments)]
        return random.Random(seed).choice([plot for plot in possible if (plot.harm, plot.moment) == (harm, moment)])

    @property
    def _can_be(self) -> bool:
        if (self.is_live and self.is_killed) or (not self.is_live and self.remedy == REMEDIES[0]):
            return False
        if self.thing in PLAN and self.moment not in ("running", "finalizing"):
            return False
        # Only one that is open at the time is written to, whatever its name is by then.
        if self.thing in ("database", "log") and self.is_live:
            return False
        if self.thing == "log" and (not self.is_killed or self.harm == "older"):
            return False
        if self.harm == "older":
            return self.remedy == "is given up" and self.thing in ("database", "everything") and not self.is_live
        if self.thing == "everything":
            return self.harm == "away" and self.remedy != "is given up"
        return True


class Gates:
    """Where a batch is kept at a moment."""

    def __init__(self) -> None:
        self.check, self.finalize = asyncio.Event(), asyncio.Event()
        self.checking, self.finalizing = asyncio.Event(), asyncio.Event()

    def open(self) -> None:
        self.check.set()
        self.finalize.set()


class GatedChecker(ThreadChecker):
    def __init__(self, gates: Gates) -> None:
        super().__init__(FakeCompiler())
        self._gates = gates

    async def check(self, check: Check, keep: Keep) -> CheckReport:
        self._gates.checking.set()
        await self._gates.check.wait()
        return await super().check(check, keep)


@dataclass
class Round:
    """``messages`` gives the log's lines since the last call."""

    seed: int
    root: Path
    messages: Callable[[], list[str]]
    plot: Plot = field(init=False)
    shown: dict[str, bytes] = field(default_factory=dict)
    """Result files that a client has had."""
    acknowledged: set[str] = field(default_factory=set)
    """Ids of what the database knew when the harm was done; and of its commits, how many lines had ended."""
    violations: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.plot = Plot.drawn(self.seed)
        self._random = random.Random(f"harm {self.seed}")
        self.data = self.root / "data"
        self._good: dict[Path, bytes] = {}
        self._batch_id: str | None = None
        self._file_id = ""
        self._num_done = 0
        self._is_dropped = False

    def _expect(self, holds: bool, otherwise: str) -> None:
        if not holds:
            self.violations.append(otherwise)

    # ---- lives -------------------------------------------------------------------------------------------

    async def run(self) -> list[str]:
        """What did not hold."""
        gates = Gates()
        async with self._life(gates) as server:
            await self._begin(server)
            await self._reach(server, gates)
            if self.plot.is_live:
                await self._harm_alive(server, gates)
            elif self.plot.is_killed:
                self.data = self._as_killed()
        if self.plot.remedy != "comes back at once":
            if not self.plot.is_live:
                self._harm()
            await self._remedy()
        await self._end()
        return self.violations

    def _as_killed(self) -> Path:
        """A copy as a kill leaves it: of one moment, so it is made again if the server has written meanwhile."""
        ignored = shutil.ignore_patterns("lock", "*-shm")
        copy = self.root / "killed"

        def written() -> dict[Path, tuple[int, int]]:
            found = {}
            for path in self.data.rglob("*"):
                with contextlib.suppress(FileNotFoundError):
                    if not path.name.endswith("-shm"):
                        found[path] = (path.stat().st_mtime_ns, path.stat().st_size)
            return found

        while True:
            before = written()
            shutil.copytree(self.data, copy, ignore=ignored)
            if written() == before:
                return copy
            shutil.rmtree(copy)

    def _life(self, gates: Gates, engine: bool = True) -> Server:
        async def write_files(ending: Any, record: BatchRecord, hold: Any) -> Any:
            gates.finalizing.set()
            waiting = asyncio.create_task(gates.finalize.wait())
            while not waiting.done() and not ending._stopping.is_set():
                await asyncio.wait({waiting}, timeout=0.005)
            waiting.cancel()
            if ending._stopping.is_set():
                raise finalize.FinalizeStoppedError
            return await type(ending)._write_files(ending, record, hold)

        server = Server(self.data, checker=GatedChecker(gates), engine=engine)
        ending: Any = server.service._machine._ending  # type: ignore[attr-defined]
        ending._write_files = lambda record, hold: write_files(ending, record, hold)
        return server

    async def _begin(self, server: Server) -> None:
        """A batch of another day, which is complete, and a file for the next."""
        other = Gates()
        other.open()
        server.engine.auto = True
        ending: Any = server.service._machine._ending  # type: ignore[attr-defined]
        gated, ending._write_files = ending._write_files, type(ending)._write_files.__get__(ending)
        checker: Any = server.service._machine._context.checker  # type: ignore[attr-defined]
        gates, checker._gates = checker._gates, other
        done = await server.create(numbered(3))
        await self._show(server, await server.until_terminal(done.id))
        ending._write_files, checker._gates = gated, gates
        server.engine.auto = False
        self._file_id = (await server.upload(numbered(NUM_LINES))).id
        self._keep_older("before")

    async def _reach(self, server: Server, gates: Gates) -> None:
        moment = self.plot.moment
        if moment == "before":
            return
        self._batch_id = batch_id = (await server.create(input_file_id=self._file_id)).id
        await gates.checking.wait()
        self._keep_older("checking")
        if moment == "checking":
            return
        gates.check.set()
        await server.until_given(batch_id)
        server.engine.answer(batch_id, NUM_LINES // 2)
        await server.until(batch_id, lambda record: record.num_completed == NUM_LINES // 2)
        self._num_done = NUM_LINES // 2
        self._keep_older("running")
        if moment == "running":
            return
        server.engine.answer(batch_id)
        await gates.finalizing.wait()
        self._num_done = NUM_LINES
        self._keep_older("finalizing")
        if moment == "complete":
            gates.open()
            await self._show(server, await server.until_terminal(batch_id))
            # What is copied now must not vanish under it.
            await until(lambda: not any((self.data / "jobs").iterdir()))

    def _keep_older(self, moment: str) -> None:
        """The copy that is put back later, of a moment before the round's own."""
        # One that knows the batch, if the round's moment has such a one behind it.
        earlier = MOMENTS[1 : MOMENTS.index(self.plot.moment)] or MOMENTS[:1]
        if self.plot.harm == "older" and moment == self._random_of_seed(earlier):
            ignored = shutil.ignore_patterns("lock", "*-shm")
            shutil.copytree(self.data, self.root / "older", ignore=ignored)
            for path in (self.root / "older").glob("*.db-wal"):
                # As ``VACUUM INTO`` or a stop would give it: one file.
                with closing(sqlite3.connect(path.with_name(DATABASE_NAME))) as connection:
                    connection.execute("pragma wal_checkpoint(truncate)")
            with closing(sqlite3.connect(self.root / "older" / DATABASE_NAME)) as connection:
                connection.execute("pragma journal_mode=delete")

    def _random_of_seed(self, choices: tuple[str, ...]) -> str:
        return random.Random(f"put back {self.seed}").choice(choices)

    async def _show(self, server: Server, record: BatchRecord) -> None:
        for file_id in (record.output_file_id, record.error_file_id):
            if file_id is not None:
                self.shown[file_id] = server.bytes_of(file_id)

    # ---- harm --------------------------------------------------------------------------------------------

    def _targets(self) -> list[Path]:
        match self.plot.thing:
            case "input":
                return [self.data / "files" / self._file_id]
            case "database":
                return [self.data / DATABASE_NAME]
            case "log":
                return [self.data / f"{DATABASE_NAME}-wal"]
            case "results":
                return [self.data / "files" / sorted(self.shown)[self._random.randrange(len(self.shown))]]
            case "everything":
                return [self.data]
            case suffix:
                return [self.data / "jobs" / f"{self._batch_id}.{suffix}"]

    def _harm(self) -> None:
        self._note_acknowledged()
        (self._target,) = self._targets()
        if self.plot.thing == "everything":
            self.data.rename(self.root / "away")
            if self.plot.harm == "older":
                shutil.copytree(self.root / "older", self.data)
            return
        # The database and its log belong together: a start has changed both.
        together = self._target.parent.glob(f"{DATABASE_NAME}*") if self.plot.thing in ("database", "log") else ()
        self._good = {path: path.read_bytes() for path in (self._target, *together) if not path.name.endswith("-shm")}
        content = self._good[self._target]
        if self.plot.harm == "away":
            self._target.unlink()
        elif self.plot.harm == "older":
            self._target.with_name(f"{DATABASE_NAME}-wal").unlink(missing_ok=True)
            self._replace(self._target, (self.root / "older" / DATABASE_NAME).read_bytes())
        elif self.plot.harm == "cut":
            self._replace(self._target, content[: self._random.randrange(max(1, len(content)))])
        elif content:
            flipped = bytearray(content)
            flipped[self._random.randrange(len(content))] ^= 1 << self._random.randrange(8)
            self._replace(self._target, flipped)

    @staticmethod
    def _replace(path: Path, content: bytes | bytearray) -> None:
        """As another file: one that is mapped must not shrink."""
        new = path.with_name(f"{path.name}.new")
        new.write_bytes(content)
        new.rename(path)

    def _undo(self) -> None:
        if self.plot.thing == "everything":
            if self.data.exists():
                shutil.rmtree(self.data)
            (self.root / "away").rename(self.data)
        if self.plot.thing in ("database", "log"):
            for path in self.data.glob(f"{DATABASE_NAME}-*"):
                path.unlink()
        for path, content in self._good.items():
            path.parent.mkdir(exist_ok=True)
            self._replace(path, content)
        if self.plot.thing in ("database", "log"):
            # What a start with an older database did not know.
            for path in (self.data / "moved-aside").rglob("*"):
                if path.is_file() and not (back := self.data / path.parent.name / path.name).exists():
                    path.rename(back)

    def _note_acknowledged(self) -> None:
        """Read from a copy of the database, with its log."""
        copy = self.root / "acknowledged"
        copy.mkdir()
        for path in self.data.glob(f"{DATABASE_NAME}*"):
            if not path.name.endswith("-shm"):
                shutil.copy(path, copy)
        self.acknowledged = _rows(copy / DATABASE_NAME)

    async def _harm_alive(self, server: Server, gates: Gates) -> None:
        self._harm()
        gates.open()
        if self._batch_id is not None and self.plot.moment == "running":
            server.engine.answer(self._batch_id, 2)
        deadline_s = asyncio.get_running_loop().time() + SHORT_S
        while asyncio.get_running_loop().time() < deadline_s:
            await self._look(server)
            await asyncio.sleep(0.005)
        if self.plot.remedy == "comes back at once":
            self._undo()

    async def _look(self, server: Server) -> None:
        """What clients do meanwhile: each answer is right or a refusal."""
        for file_id, content in self.shown.items():
            await self._check_served(server, file_id, content)
        if self._batch_id is not None:
            try:
                record = await server.get(self._batch_id)
            except (ApiError, StoreUnavailableError):
                return
            self._expect(record.num_failed == 0, f"a line ended meanwhile: {record.num_failed}")

    async def _check_served(self, server: Server, file_id: str, content: bytes) -> bool:
        """Whether the file is served; a wrong one is a violation."""
        try:
            record = await server.service.files.get(file_id, "")
            with await server.service.files.open(record) as file:
                served = file.read()
        except (ApiError, OSError, StoreUnavailableError):
            return False
        self._expect(served == content, f"{file_id} is served with other bytes")
        return True

    # ---- remedies ----------------------------------------------------------------------------------------

    async def _remedy(self) -> None:
        is_refused = await self._start_harmed()
        if self.plot.remedy == "is put back" or is_refused:
            self._undo()
            self._good.clear()
            self.plot = replace(self.plot, remedy="is put back")
        elif self.plot.thing in ("input", "results"):
            store = Store(self.data)
            store.open()
            repairs = list(repair(store))
            store.close()
            self._expect(any(self._target.name in text for text in repairs), f"not repaired: {repairs}")
            self._is_dropped = self.plot.thing == "input"

    async def _start_harmed(self) -> bool:
        """Whether the server refuses to start; it, or what it says, must name what is wrong."""
        self.messages()
        if self.plot.thing == "everything" and self.plot.harm == "away":
            return True
        gates = Gates()
        gates.open()
        try:
            async with self._life(gates, engine=False) as server:
                await asyncio.sleep(SHORT_S)
                await self._look(server)
        except StoreError as error:
            self._expect("\n" not in str(error), f"a refusal of several lines: {error}")
            self._expect(str(self.data) in str(error), f"a refusal that names nothing: {error}")
            return True
        self._check_named(self.messages())
        return False

    def _check_named(self, messages: list[str]) -> None:
        text = "\n".join(messages)
        if self.plot.thing in ("input", "results") and self.plot.harm in ("away", "cut"):
            self._expect(self._target.name in text, f"the start does not name {self._target.name}")
        if self.plot.thing == "input" and self.plot.moment in ("checking", "running"):
            self._expect(self._target.name in text, f"nothing names the input that is {self.plot.harm}")
        if self.plot.thing in ("database", "log"):
            lost = self.acknowledged - _rows(self.data / DATABASE_NAME)
            if lost and self.plot.harm != "flipped":
                self._expect("lacks its last" in text, f"the start does not say that {sorted(lost)[:3]} are lost")
            if lost and self.plot.thing == "log":
                self._expect("lacks its last" in text, f"the start does not say that {sorted(lost)[:3]} are lost")

    # ---- the end -----------------------------------------------------------------------------------------

    async def _end(self) -> None:
        gates = Gates()
        gates.open()
        server = self._life(gates)
        server.engine.auto = True
        async with server:
            if self._batch_id is None:
                try:
                    self._batch_id = (await server.create(input_file_id=self._file_id)).id
                except ApiError:
                    self._expect(self._may_be_unknown, "the input is not known any more")
                    return
            try:
                async with asyncio.timeout(LONG_S):
                    record = await server.until_terminal(self._batch_id)
            except ApiError:
                self._expect(self._may_be_unknown, f"{self._batch_id} is not known any more")
            except TimeoutError:
                found = await server.get(self._batch_id)
                self.violations.append(f"the batch does not end: {found.status}, {found.num_completed} done")
            else:
                await self._check_batch(server, record)
            for file_id, content in self.shown.items():
                await self._check_shown(server, file_id, content)

    @property
    def _may_be_unknown(self) -> bool:
        """An older database went on."""
        is_older = self.plot.harm == "older" or self.plot.thing in ("database", "log")
        return self.plot.remedy == "is given up" and is_older

    async def _check_batch(self, server: Server, record: BatchRecord) -> None:
        if record.status == "failed":
            codes = [error["code"] for error in record.errors or []]
            may_fail = (self._is_dropped and self._num_done == 0) or self._may_be_unknown
            self._expect(may_fail, f"the batch failed: {codes}")
            return
        if self.plot.moment == "complete" and self.plot.remedy == "is given up" and self.plot.thing == "results":
            self._expect(record.status == "completed", "a complete batch is not complete")
        try:
            found, errors = server.results(record)
        except (AssertionError, OSError) as error:
            self.violations.append(f"the results do not agree with the batch: {error}")
            return
        wrong = [name for name, line in found.items() if not is_right(line)]
        self._expect(not wrong, f"wrong answers: {wrong}")
        codes = sorted({str(line["error"] and line["error"]["code"]) for line in errors.values()})
        self._expect(not errors or self._is_dropped, f"{len(errors)} lines failed: {codes}")
        if errors:
            self._expect(codes == ["input_file_lost"], f"lines failed as {codes}")
            self._expect(len(found) >= self._num_done, f"{len(found)} of {self._num_done} results are left")
        self._expect(len(found) + len(errors) == NUM_LINES, f"{len(found)} and {len(errors)} of {NUM_LINES} lines")

    async def _check_shown(self, server: Server, file_id: str, content: bytes) -> None:
        if await self._check_served(server, file_id, content):
            return
        self._expect(self._may_be_unknown, f"{file_id} was shown and is not served")
        if self.plot.thing != "everything":
            copies = [path.read_bytes() for path in (self.data / "moved-aside").rglob(file_id)]
            self._expect(content in copies, f"{file_id} was shown and is nowhere")


def is_right(line: dict[str, Any]) -> bool:
    return bool(line["response"]["body"]["choices"][0]["text"] == f"text of {line['custom_id']}"[::-1])


def _rows(database: Path) -> set[str]:
    """What of clients is in a database: files, batches, ended lines."""
    queries = (
        "select id from files",
        "select id from batches",
        "select batch_id || ' ' || line_no from batch_lines where state != 'pending'",
    )
    with closing(sqlite3.connect(database)) as connection:
        return {str(row[0]) for query in queries for row in connection.execute(query)}
