"""Sequences, not single requests: what was valid stays valid after what was not, and the other way round."""

import json
import random
from typing import Any

import pytest

from tests.fuzz.app import CANARY, FuzzedApp
from tests.server.conftest import MODEL_ID
from tests.server.http.test_errors import BAD_CHAT, BAD_COMPLETIONS, BAD_JSON

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
JSON = {"content-type": "application/json"}
GOOD_LINE = {"custom_id": "a", "method": "POST", "url": CHAT, "body": CANARY}
BAD_FILES = [
    b"",
    b"\n\n",
    b"\x00",
    b"{",
    b"[1]\n",
    b'{"custom_id": "\\ud800"}\n',
    json.dumps(GOOD_LINE).encode()[:-9],
    json.dumps(GOOD_LINE | {"custom_id": "a\0"}).encode() + b"\n" + b"\xff",
    json.dumps(GOOD_LINE | {"url": "/v1/embeddings"}).encode(),
    json.dumps(GOOD_LINE | {"method": "GET"}).encode(),
    json.dumps(GOOD_LINE | {"body": {"model": "other"}}).encode(),
    2 * (json.dumps(GOOD_LINE).encode() + b"\n"),
]


class Actions:
    """Steps of a sequence; each checks its own reply."""

    def __init__(self, app: FuzzedApp, choose: random.Random) -> None:
        self._app = app
        self._choose = choose

    def step(self) -> None:
        self._choose.choice([self.good, self.bad])()
        self._app.check_canary()

    def good(self) -> None:
        self._choose.choice([self._stream, self._completion, self._batch, self._tokenize, self._upload_and_delete])()

    def bad(self) -> None:
        self._choose.choice([self._bad_chat, self._bad_completion, self._bad_json, self._bad_batch, self._bad_form])()

    # ---- valid ----

    def _stream(self) -> None:
        reply = self._app.request("POST", CHAT, json=CANARY | {"stream": True})
        chunks = [json.loads(event[6:]) for event in reply.text.split("\n\n") if event.startswith("data: {")]
        assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == self._app.canary
        assert reply.text.endswith("data: [DONE]\n\n")

    def _completion(self) -> None:
        body = {"model": MODEL_ID, "prompt": "a\0b", "max_tokens": 3, "n": 2, "logprobs": 2, "echo": True}
        assert self._app.request("POST", COMPLETIONS, json=body).status_code == 200

    def _tokenize(self) -> None:
        reply = self._app.request("POST", "/tokenize", json={"prompt": "some text"})
        back = self._app.request("POST", "/detokenize", json={"tokens": reply.json()["tokens"]})
        assert back.json()["prompt"].strip() == "some text"

    def _batch(self) -> None:
        batch = self._run_batch(json.dumps(GOOD_LINE).encode())
        assert batch["status"] == "completed", batch
        content = self._app.request("GET", f"/v1/files/{batch['output_file_id']}/content").json()
        assert content["response"]["body"]["choices"][0]["message"]["content"] == self._app.canary

    def _upload_and_delete(self) -> None:
        file_id = self._upload(b"anything", "user_data")
        assert self._app.request("DELETE", f"/v1/files/{file_id}").json()["deleted"] is True
        assert self._app.request("GET", f"/v1/files/{file_id}").status_code == 404

    # ---- not valid ----

    def _bad_chat(self) -> None:
        fields, _, _ = self._choose.choice(BAD_CHAT)
        self._refused(self._app.request("POST", CHAT, json=CANARY | fields))

    def _bad_completion(self) -> None:
        fields, _, _ = self._choose.choice(BAD_COMPLETIONS)
        self._refused(self._app.request("POST", COMPLETIONS, json={"model": MODEL_ID, "prompt": "x", **fields}))

    def _bad_json(self) -> None:
        name, raw, _ = self._choose.choice(BAD_JSON)
        raw = raw.replace(b"%s", f'"model": "{MODEL_ID}", "prompt": "x"'.encode())
        path = self._choose.choice([COMPLETIONS, CHAT, "/tokenize", "/detokenize", "/v1/batches", "/admin/offline"])
        if name == "true as int":  # a fault where the field is known, else ignored
            path = COMPLETIONS
        self._refused(self._app.request("POST", path, content=raw, headers=JSON))

    def _bad_batch(self) -> None:
        batch = self._run_batch(self._choose.choice(BAD_FILES))
        assert (batch["status"], batch["request_counts"]["total"]) == ("failed", 0)

    def _bad_form(self) -> None:
        raw = self._choose.choice([b"", b"--b", b"--b\r\n\r\n", b"--b\r\nContent-Disposition: form-data\r\n\r\n\0"])
        headers = {"content-type": self._choose.choice(["multipart/form-data; boundary=b", "multipart/form-data", ""])}
        self._refused(self._app.request("POST", "/v1/files", content=raw, headers=headers))

    # ---- tools ----

    @staticmethod
    def _refused(reply: Any) -> None:
        assert reply.status_code in (400, 404), reply.text
        assert set(reply.json()["error"]) == {"message", "type", "param", "code"}

    def _upload(self, content: bytes, purpose: str) -> str:
        files = {"file": ("in.jsonl", content)}
        reply = self._app.request("POST", "/v1/files", files=files, data={"purpose": purpose})
        assert reply.status_code == 200, reply.text
        return str(reply.json()["id"])

    def _run_batch(self, content: bytes) -> dict[str, Any]:
        body = {"input_file_id": self._upload(content, "batch"), "endpoint": CHAT, "completion_window": "24h"}
        batch: dict[str, Any] = self._app.request("POST", "/v1/batches", json=body).json()
        self._app.wait_until(lambda: self._get(batch["id"])["status"] in ("completed", "failed"))
        return self._get(batch["id"])

    def _get(self, batch_id: str) -> dict[str, Any]:
        found: dict[str, Any] = self._app.request("GET", f"/v1/batches/{batch_id}").json()
        return found


def walk(app: FuzzedApp, seed: int, num_steps: int) -> None:
    actions = Actions(app, random.Random(seed))
    for _ in range(num_steps):
        actions.step()


@pytest.mark.acceptance("A23", "requests in sequences, good after bad and bad after good, with a canary", count=30)
@pytest.mark.parametrize("seed", range(2))
def test_sequences(fuzzed: FuzzedApp, seed: int) -> None:
    walk(fuzzed, seed, 30)


@pytest.mark.full
@pytest.mark.acceptance("A23", "requests in sequences, good after bad and bad after good, with a canary", count=200)
@pytest.mark.parametrize("seed", range(10, 20))
def test_long_sequences(fuzzed: FuzzedApp, seed: int) -> None:
    walk(fuzzed, seed, 200)
