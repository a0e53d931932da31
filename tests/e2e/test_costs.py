"""Device time by key at a real server with a model: the sums, a receipt, and what a kill leaves of them."""

import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import openai

from neaptide.server.http.auth import principal_for
from tests.e2e.server import RunningServer, wait_terminal
from tests.patience import PATIENCE_S

KEYS = ("key-of-shop:admin", "key-of-night")
FLAGS = ("--max-model-len", "1024", "--dtype", "float32", "--profile", "cpu-neaptide-tiny", "--shadow", "off")
PREFIX = "The tide comes in twice a day and goes out twice a day. " * 8


def series(server: RunningServer, name: str) -> dict[str, float]:
    """Values of a series by their labels."""
    text = server.http.get("/metrics").raise_for_status().text
    return {labels: float(value) for labels, value in re.findall(rf"^{name}(\{{.*\}}) (\S+)$", text, re.MULTILINE)}


def chat(server: RunningServer, key: str, text: str) -> None:
    with openai.OpenAI(base_url=server.base_url, api_key=key, max_retries=0, timeout=PATIENCE_S) as client:
        client.chat.completions.create(model="", messages=[{"role": "user", "content": text}], max_tokens=24)


def submit(server: RunningServer, key: str, count: int) -> str:
    lines = [
        {
            "custom_id": f"c{number}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"model": "neaptide-tiny", "prompt": f"{PREFIX}{number}+1=", "max_tokens": 8, "ignore_eos": True},
        }
        for number in range(count)
    ]
    with openai.OpenAI(base_url=server.base_url, api_key=key, timeout=PATIENCE_S) as client:
        content = "\n".join(map(json.dumps, lines)).encode()
        file = client.files.create(file=("lines.jsonl", content), purpose="batch")
        return client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h").id


def command(server: RunningServer, *argv: str) -> Any:
    found = subprocess.run(
        [sys.executable, "-m", "neaptide", *argv, "--json"], capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert found.returncode == 0, found.stderr
    return json.loads(found.stdout)


def test_the_sums_over_keys_are_the_devices_time_and_a_kill_leaves_one_receipt(tmp_path: Path) -> None:
    accepted = [flag for key in KEYS for flag in ("--api-key", key)]
    shop, night = (principal_for(key.partition(":")[0]).share for key in KEYS)
    with RunningServer(tmp_path, *FLAGS, *accepted) as server:
        server.http.headers["Authorization"] = "Bearer key-of-night"
        batch_id = submit(server, "key-of-night", 40)
        chat(server, "key-of-shop", PREFIX)
        chat(server, "key-of-night", PREFIX)
        wait_terminal(server, batch_id)
        # The engine's last report, so that no step is on its way.
        server.wait_for(lambda: sum(series(server, "neaptide_requests_running").values()) == 0)
        by_key = series(server, "neaptide_key_device_seconds_total")
        assert set(by_key) == {
            f'{{key="{shop}",work="chats"}}',
            f'{{key="{night}",work="chats"}}',
            f'{{key="{night}",work="batch"}}',
        }
        busy_s = series(server, "neaptide_step_seconds_sum")['{phase="total"}']
        assert abs(sum(by_key.values()) / busy_s - 1) < 0.01
        receipt = server.http.get(f"/v1/batches/{batch_id}/receipt").raise_for_status().json()
        tokens = receipt["tokens"]
        # A prompt of which a step computes the last token alone counts there as a decode.
        assert 40 * 7 <= tokens["computed_decode"] <= 40 * 8
        # A chat of the same key reads no more than the first tokens of the prefix, if any.
        assert abs(tokens["prefill_share"] - tokens["computed_prefill"]) <= tokens["computed_prefill"] / 10
        assert tokens["found_in_cache"] > tokens["computed_prefill"]
        assert abs(receipt["computed_device_seconds"] / by_key[f'{{key="{night}",work="batch"}}'] - 1) < 0.01
        assert abs(sum(receipt["time_seconds"].values()) - (receipt["ended_at"] - receipt["created_at"])) < 0.5

        cut = submit(server, "key-of-night", 120)
        server.wait_for(lambda: server.http.get(f"/v1/batches/{cut}").json()["request_counts"]["completed"] >= 8)
        server.process.send_signal(signal.SIGKILL)
        server.process.wait(PATIENCE_S)
        server.start()
        wait_terminal(server, cut)
        assert server.http.get(f"/v1/batches/{batch_id}/receipt").json() == receipt
        resumed = server.http.get(f"/v1/batches/{cut}/receipt").raise_for_status().json()
        assert resumed["lines"] == {"total": 120, "completed": 120, "failed": 0}
        for changed, is_confirmed in ((resumed, True), (receipt, True), (resumed | {"preemptions": 7}, False)):
            check = server.http.post("/v1/batches/check_receipt", json=changed).raise_for_status().json()
            assert check["confirmed"] is is_confirmed
        costs = command(server, "data", "costs", "--data-dir", str(server.data_dir))["costs"]
        assert {(one["key"], one["work"]) for one in costs} == {(shop, "chats"), (night, "chats"), (night, "batch")}
