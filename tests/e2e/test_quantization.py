"""A real server with 8-bit weights."""

import shutil
from pathlib import Path

import pytest
import torch

from neaptide.kernels.native import COMPILERS
from neaptide.kernels.row_quantization import ByteProduct
from tests.e2e.server import RunningServer, result_lines, submit_batch, wait_terminal

HAS_COMPILER = any(map(shutil.which, COMPILERS))


@pytest.mark.skipif(
    not HAS_COMPILER or not ByteProduct.takes(torch.float32, 64), reason="nothing multiplies 8-bit numbers here"
)
def test_chats_and_batches_are_answered(tmp_path: Path) -> None:
    asked = {
        "model": "neaptide-tiny",
        "messages": [{"role": "user", "content": "What is 21 + 34?"}],
        "temperature": 0.0,
    }
    flags = ["--quantization", "w8a8", "--dtype", "float32", "--profile", "cpu-neaptide-tiny"]
    with RunningServer(tmp_path, *flags, "--max-model-len", "1024") as server:
        reply = server.http.post("/v1/chat/completions", json=asked).json()
        [line] = result_lines(server, wait_terminal(server, submit_batch(server, [asked])))
    answers = [body["choices"][0]["message"]["content"] for body in (reply, line["response"]["body"])]
    assert "55" in answers[0]
    assert answers == answers[:1] * 2
