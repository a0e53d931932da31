"""A file of keys at a real server: limits for a real client, changes without a restart, a day that a restart keeps."""

import json
import os
import signal
from pathlib import Path

import openai
import pytest

from neaptide.engine.record.step_log import WeightsLine, read_log
from neaptide.server.http.auth import principal_for
from tests.e2e.conftest import SIM
from tests.e2e.server import RunningServer
from tests.patience import PATIENCE_S

FIRST = '[[keys]]\nkey = "first"\nname = "shop"\nadmin = true\ntokens_per_day = 40\n'
SECOND = '[[keys]]\nkey = "second"\nweight = 3\n'


def write(file: Path, text: str) -> None:
    new = file.with_suffix(".new")
    new.write_text(text)
    os.replace(new, file)


def chat(server: RunningServer, key: str) -> int:
    """The tokens that it took."""
    with openai.OpenAI(base_url=server.base_url, api_key=key, max_retries=0, timeout=PATIENCE_S) as client:
        reply = client.chat.completions.create(model="", messages=[{"role": "user", "content": "Hi"}], max_tokens=20)
    assert reply.usage is not None
    return reply.usage.total_tokens


def use_up(server: RunningServer) -> None:
    """One request fits into 40 tokens, a second does not."""
    assert 20 < chat(server, "first") <= 40
    with pytest.raises(openai.RateLimitError) as caught:
        chat(server, "first")
    assert (caught.value.type, caught.value.code) == ("tokens", "rate_limit_exceeded")


def test_keys_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    write(file, FIRST)
    log = tmp_path / "steps.log"
    flags = ("--api-key-file", str(file), "--step-log", str(log))
    with RunningServer(tmp_path, *flags, env=SIM | {"NEAPTIDE_SIM_STEP_MS": "1"}) as server:
        assert "is accepted, name shop, tier default, tokens_per_day 40, admin" in server.log
        use_up(server)

        write(file, SECOND)
        server.process.send_signal(signal.SIGHUP)
        server.wait_for(lambda: "the key file was read again: 1 keys, 1 new, 1 gone" in server.log)
        assert chat(server, "second") > 0
        with pytest.raises(openai.AuthenticationError):
            chat(server, "first")

        write(file, "keys = [")
        server.process.send_signal(signal.SIGHUP)
        server.wait_for(lambda: "is not TOML; the keys of before stay" in server.log)
        assert chat(server, "second") > 0

        # The file is watched, too.
        write(file, FIRST + SECOND)
        server.wait_for(lambda: "the key file was read again: 2 keys, 1 new, 0 gone" in server.log)

        with openai.OpenAI(base_url=server.base_url, api_key="second", timeout=PATIENCE_S) as client:
            line = {
                "custom_id": "a",
                "method": "POST",
                "url": "/v1/completions",
                "body": {"model": "", "prompt": "2+2="},
            }
            lines = client.files.create(file=("lines.jsonl", json.dumps(line).encode()), purpose="batch")
            client.batches.create(input_file_id=lines.id, endpoint="/v1/completions", completion_window="24h")

        server.process.terminate()
        assert server.process.wait(PATIENCE_S) == 0
        # The engine was told of the weight, and once: it has not changed since.
        weights = [line.weights for line in read_log(log) if isinstance(line, WeightsLine)]
        assert weights == [{principal_for("second").share: 3.0}]
        assert "batches that no caller sees" not in server.log
        write(file, FIRST)
        server.start()
        assert "batches that no caller sees: 1, made with another API key or without one" in server.log
        with pytest.raises(openai.RateLimitError, match="tokens per day"):
            chat(server, "first")
