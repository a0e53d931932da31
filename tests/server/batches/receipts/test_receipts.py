"""Receipts of batches: what is in them, who may see them, and what the server confirms."""

import copy
import json
import stat
from pathlib import Path
from typing import Any

import pytest

from neaptide.commands.receipts import receipt_lines
from neaptide.durations import DAY_S
from neaptide.engine.messages import DeviceCharge, RecentSteps, StepOutputs
from neaptide.server.batches.receipts import receipt as receipts
from neaptide.server.batches.receipts.receipt import Seal
from neaptide.server.batches.storing import cost_rows
from neaptide.server.batches.storing.cost_rows import CostOf, KeyCost
from neaptide.server.batches.storing.data_dir import RECEIPT_KEY
from neaptide.server.batches.storing.models import BatchRecord
from neaptide.server.why.device_time import DeviceTimeSums
from tests.server.batches.fakes import CHAT, FakeClock, Server, jsonl, line, numbered
from tests.server.batches.test_http import app_of, http_client


def charge(batch_id: str, share: str = "", work: str = "batch", seconds: float = 1.0, fair_s: float = 1.0) -> Any:
    return DeviceCharge(share, work, batch_id, fair_s, seconds, 5.5, 4, 3, 2, 1, 1)


def say(server: Server, *charges: DeviceCharge) -> None:
    server.client.on_message(StepOutputs([], [], recent=RecentSteps(0.0, 16, [], [], charges=list(charges))))


async def ended(server: Server, content: bytes = numbered(3), **fields: Any) -> str:
    batch = await server.create(content, **fields)
    await server.until_given(batch.id)
    server.engine.answer(batch.id)
    return (await server.until_terminal(batch.id)).id


async def promised(server: Server, due_at: int) -> BatchRecord:
    """A batch that the engine has, and that was quoted to end by ``due_at``."""

    async def promise(file_id: str, accept_by_s: int) -> int:
        return due_at

    file = await server.upload(numbered(3))
    body = {"endpoint": CHAT, "completion_window": "24h", "input_file_id": file.id, "accept_by": due_at}
    batch = await server.service.create_batch("", body, promise=promise)
    await server.until_given(batch.id)
    return batch


async def test_an_ended_batch_has_a_receipt_that_the_server_confirms(tmp_path: Path) -> None:
    async with Server(tmp_path) as server, http_client(app_of(server)) as client:
        batch = await server.create(numbered(3))
        await server.until_given(batch.id)
        early = await client.get(f"/v1/batches/{batch.id}/receipt")
        assert (early.status_code, early.json()["error"]["code"]) == (409, "batch_not_ended")
        say(server, charge(batch.id, seconds=2.0, fair_s=3.0), charge("batch_of_another"), charge("", work="chats"))
        say(server, charge(batch.id, seconds=2.0, fair_s=-0.5))
        server.engine.answer(batch.id)
        await server.until_terminal(batch.id)
        receipt = (await client.get(f"/v1/batches/{batch.id}/receipt")).raise_for_status().json()
        assert (receipt["object"], receipt["id"], receipt["status"]) == ("batch.receipt", batch.id, "completed")
        assert (receipt["device_seconds"], receipt["computed_device_seconds"]) == (2.5, 4.0)
        assert receipt["tokens"] == {
            "prompt": 30,
            "answers": 30,
            "found_in_cache": 2,
            "prefill_share": 11,
            "computed_prefill": 8,
            "computed_decode": 6,
            "computed_again": 4,
        }
        assert (receipt["preemptions"], receipt["lines"]["completed"], receipt["promise"]) == (2, 3, None)
        again = (await client.get(f"/v1/batches/{batch.id}/receipt")).json()
        assert again == receipt
        check = await client.post("/v1/batches/check_receipt", json=receipt)
        assert check.json() == {"object": "batch.receipt.check", "confirmed": True}


def changed(path: tuple[str, ...], value: Any) -> Any:
    def change(receipt: dict[str, Any]) -> None:
        place = receipt
        for name in path[:-1]:
            place = place[name]
        place[path[-1]] = value

    return change


@pytest.mark.parametrize(
    "change",
    [
        changed(("device_seconds",), 1.0),
        changed(("tokens", "prompt"), 29),
        changed(("lines", "failed"), 1),
        changed(("time_seconds",), {"chats": 1.0}),
        changed(("hash",), "0" * 64),
        changed(("more",), 1),
    ],
)
async def test_a_changed_receipt_is_not_confirmed(tmp_path: Path, change: Any) -> None:
    async with Server(tmp_path) as server, http_client(app_of(server)) as client:
        server.engine.row_s = 0.5
        receipt = (await client.get(f"/v1/batches/{await ended(server)}/receipt")).json()
        in_other_order = copy.deepcopy(dict(sorted(receipt.items(), reverse=True)))
        change(receipt)
        for body, is_confirmed in ((in_other_order, True), (receipt, False)):
            assert (await client.post("/v1/batches/check_receipt", json=body)).json()["confirmed"] is is_confirmed


@pytest.mark.parametrize("body", [{}, {"object": "batch.receipt"}, {"object": "batch", "hash": "x"}, [1]])
async def test_what_is_no_receipt_is_refused(tmp_path: Path, body: Any) -> None:
    async with Server(tmp_path) as server, http_client(app_of(server)) as client:
        assert (await client.post("/v1/batches/check_receipt", json=body)).status_code == 400


async def test_another_keys_receipt_does_not_exist(tmp_path: Path) -> None:
    async with Server(tmp_path) as server, http_client(app_of(server, ["k"]), "k") as client:
        assert (await client.get(f"/v1/batches/{await ended(server)}/receipt")).status_code == 404


async def test_a_refused_file_has_cost_nothing(tmp_path: Path) -> None:
    async with Server(tmp_path) as server, http_client(app_of(server)) as client:
        batch = await server.create(b"{}\n")
        await server.until_terminal(batch.id)
        receipt = (await client.get(f"/v1/batches/{batch.id}/receipt")).json()
        assert (receipt["status"], receipt["device_seconds"], receipt["time_seconds"]) == ("failed", 0.0, {})


async def test_a_batch_of_an_older_version_has_none(tmp_path: Path) -> None:
    async with Server(tmp_path) as server, http_client(app_of(server)) as client:
        batch_id = await ended(server)
        await server.service.store.write(lambda conn: conn.exec_driver_sql("DELETE FROM batch_receipts"))
        reply = await client.get(f"/v1/batches/{batch_id}/receipt")
        assert (reply.status_code, reply.json()["error"]["code"]) == (404, "receipt_not_found")


async def test_what_an_engine_does_not_charge_is_unknown(tmp_path: Path) -> None:
    async with Server(tmp_path) as server:
        receipt = await server.service.receipt(await ended(server), "")
        assert receipt["device_seconds"] is None


async def test_a_cancelled_batch_pays_for_what_it_had(tmp_path: Path) -> None:
    async with Server(tmp_path) as server:
        server.engine.row_s = 0.5
        batch = await server.create(numbered(3))
        await server.until_given(batch.id)
        server.engine.answer(batch.id, 2)
        await server.service.cancel_batch(batch.id, "")
        await server.until_terminal(batch.id)
        receipt = await server.service.receipt(batch.id, "")
        assert (receipt["status"], receipt["device_seconds"]) == ("cancelled", 1.0)
        assert receipt["lines"] == {"total": 3, "completed": 2, "failed": 0}


@pytest.mark.parametrize(
    ("late_s", "is_kept", "sentence"), [(-90, True, "kept, 90 s early"), (30, False, "missed, by 30 s")]
)
async def test_it_says_whether_the_quoted_end_was_kept(
    tmp_path: Path, late_s: int, is_kept: bool, sentence: str
) -> None:
    async with Server(tmp_path) as server:
        due_at = int(server.clock.now_s) + 600
        batch = await promised(server, due_at)
        server.clock.now_s = float(due_at + late_s)
        server.engine.answer(batch.id)
        await server.until_terminal(batch.id)
        receipt = await server.service.receipt(batch.id, "")
        assert receipt["promise"] == {"due_at": due_at, "kept": is_kept, "early_seconds": -late_s}
        assert next(receipt_lines(receipt)).endswith(f" The quoted end was {sentence}.")


async def test_a_cancelled_batch_keeps_no_promise(tmp_path: Path) -> None:
    async with Server(tmp_path) as server:
        batch = await promised(server, int(server.clock.now_s) + 600)
        await server.service.cancel_batch(batch.id, "")
        await server.until_terminal(batch.id)
        receipt = await server.service.receipt(batch.id, "")
        assert (receipt["status"], receipt["promise"]["kept"]) == ("cancelled", False)
        assert next(receipt_lines(receipt)).endswith(" The quoted end was not kept.")


async def test_the_sums_go_on_after_a_kill(tmp_path: Path) -> None:
    """What was stored before the end without a goodbye, and what the next start adds, is in the one receipt."""
    clock = FakeClock()
    async with Server(tmp_path, clock=clock) as server:
        server.engine.row_s = 0.5
        batch = await server.create(numbered(4))
        await server.until_given(batch.id)
        server.engine.answer(batch.id, 1)
        await server.until(batch.id, lambda record: record.num_completed == 1)
        await server.service.costs.store_now()
        say(server, charge(batch.id))
        server.service.costs._changed_batches.clear()  # Killed before it could be stored.
        server.service.costs._changed_days.clear()
    for rows in (1, 2):
        async with Server(tmp_path, clock=clock) as server:
            server.engine.row_s = 0.5
            await server.until_given(batch.id)
            server.engine.answer(batch.id, 1)
            await server.service.costs.store_now()
            if rows == 2:
                server.engine.answer(batch.id, 1)
                await server.until_terminal(batch.id)
                receipt = await server.service.receipt(batch.id, "")
    assert (receipt["device_seconds"], receipt["tokens"]["computed_prefill"]) == (2.0, 28)
    async with Server(tmp_path, clock=clock) as server:
        assert await server.service.receipt(batch.id, "") == receipt
        costs = await server.service.store.read(cost_rows.costs_by_day, 0)
        assert [one.cost.device_s for one in costs] == [2.0]
        left = await server.service.store.read(
            lambda conn: conn.exec_driver_sql("SELECT count(*) FROM batch_costs").scalar_one()
        )
        assert left == 0


async def test_late_sums_do_not_come_back_after_the_receipt(tmp_path: Path) -> None:
    async with Server(tmp_path) as server:
        batch_id = await ended(server)
        store = server.service.store
        await store.write(cost_rows.store_costs, "run", {batch_id: "{}", "batch_gone": "{}"}, {})
        query = "SELECT count(*) FROM batch_costs"
        assert await store.read(lambda conn: conn.exec_driver_sql(query).scalar_one()) == 0


async def test_the_time_is_split_into_its_parts(tmp_path: Path) -> None:
    async with Server(tmp_path) as server:
        costs, clock = server.service.costs, server.clock
        costs.uses = DeviceTimeSums(server.client, lambda: clock.now_s)
        batch = await server.create(numbered(1), accept_by=None)
        await server.until_given(batch.id)
        for _ in range(6):
            report = RecentSteps(0.0, 16, [], [], 2.0, {"": 3.0, "other": 4.0}, span_s=10.0)
            server.client.on_message(StepOutputs([], [], recent=report))
            clock.now_s += 10.0
            await costs.store_now()
        server.client.detach()
        clock.now_s += 40.0
        server.engine = server.new_engine()
        await server.until_given(batch.id)
        server.engine.answer(batch.id)
        await server.until_terminal(batch.id)
        receipt = await server.service.receipt(batch.id, "")
        assert sum(receipt["time_seconds"].values()) == receipt["ended_at"] - receipt["created_at"] == 100
        assert receipt["time_seconds"] == pytest.approx(
            {"chats": 12.0, "own_key": 18.0, "other_keys": 24.0, "between_steps": 6.0, "engine_gone": 40.0}
        )


async def test_costs_are_kept_by_key_day_and_work(tmp_path: Path) -> None:
    async with Server(tmp_path) as server:
        costs, clock = server.service.costs, server.clock
        costs.label_of = lambda share: "shop" if share == "a" else share
        day = int(clock.now_s // DAY_S)
        say(server, charge("", "a", "chats"), charge("x", "a"), charge("y", "a"), charge("", "b", "flex"))
        await costs.store_now()
        clock.now_s += DAY_S
        say(server, charge("", "a", "chats"))
        await costs.store_now()
        found = await server.service.store.read(cost_rows.costs_by_day, day)
        assert {tuple(one.of): one.cost for one in found} == {
            (day, "b", "flex"): KeyCost(1.0, 4, 3),
            (day, "shop", "batch"): KeyCost(2.0, 8, 6),
            (day, "shop", "chats"): KeyCost(1.0, 4, 3),
            (day + 1, "shop", "chats"): KeyCost(1.0, 4, 3),
        }
        assert costs.totals["shop", "chats"] == KeyCost(2.0, 8, 6)
        clock.now_s += cost_rows.KEPT_DAYS * DAY_S
        say(server, charge("", "b", "flex"))
        await costs.store_now()
        left = await server.service.store.read(cost_rows.costs_by_day, 0)
        assert [one.of for one in left] == [
            CostOf(day + 1, "shop", "chats"),
            CostOf(day + 1 + cost_rows.KEPT_DAYS, "b", "flex"),
        ]


def test_the_seal_stays_with_the_directory_and_no_other_user_can_read_it(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    receipt = {"object": "batch.receipt", "n": 1.0, "parts": [{"b": 2, "a": 1.5}]}
    digest = Seal.of_directory(tmp_path).hash_of(receipt)
    assert stat.S_IMODE((tmp_path / RECEIPT_KEY).stat().st_mode) == 0o600
    signed = json.loads(json.dumps({"parts": [{"a": 1.5, "b": 2}], "n": 1, "object": "batch.receipt", "hash": digest}))
    assert Seal.of_directory(tmp_path).confirms(signed)
    assert not Seal.of_directory(tmp_path / "other").confirms(signed)
    (tmp_path / RECEIPT_KEY).write_text("torn")
    assert not Seal.of_directory(tmp_path).confirms(signed)
    assert len((tmp_path / RECEIPT_KEY).read_text()) == 2 * receipts.KEY_BYTES


async def test_servers_that_share_batches_give_no_receipts(tmp_path: Path) -> None:
    async with Server(tmp_path) as server, http_client(app_of(server)) as client:
        batch_id = await ended(server, jsonl([line("a")]))
        server.service._seal = None  # As with shared storage.
        for reply in (
            await client.get(f"/v1/batches/{batch_id}/receipt"),
            await client.post("/v1/batches/check_receipt", json={"object": "batch.receipt", "hash": ""}),
        ):
            assert (reply.status_code, reply.json()["error"]["code"]) == (409, "receipts_unavailable")
