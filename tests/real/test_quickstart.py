"""What the quickstart and the demo say to do, with a real model."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import openai
import pytest

from tests.e2e.server import RunningServer
from tests.patience import PATIENCE_S
from tests.real.conftest import NAME

pytestmark = [pytest.mark.real, pytest.mark.timeout(1800)]
REPOSITORY = Path(__file__).parents[2]
PAGE_MODEL = "Qwen3-0.6B"


def run(*command: str, cwd: Path, **env: str) -> str:
    """Its output. With the installed command, and without colours."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = os.environ | {"PATH": path, "NO_COLOR": "1", **env}
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=environment, timeout=3 * PATIENCE_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def blocks() -> list[str]:
    """The commands of the page once the real model is served."""
    page = (REPOSITORY / "docs/quickstart.md").read_text(encoding="utf-8")
    sections = page.partition("## 4.")[2].partition("## Next")[0]
    found: list[str] = re.findall(r"```sh\n(.*?)```", sections, re.DOTALL)
    return [block for block in found if not block.startswith("neaptide serve")]


def test_the_commands_of_the_quickstart(server: RunningServer, client: openai.OpenAI, tmp_path: Path) -> None:
    chat, batch, load = blocks()
    address = f"127.0.0.1:{server.port}"
    env = {"NEAPTIDE_BASE_URL": f"http://{address}", "PYTHONPATH": str(REPOSITORY)}
    reply = json.loads(run("bash", "-ec", chat.replace("127.0.0.1:8000", address), cwd=tmp_path))
    assert reply["choices"][0]["message"]["content"]
    batch_id = run("bash", "-ec", batch.replace(PAGE_MODEL, NAME), cwd=tmp_path, **env).strip()
    counts = client.batches.retrieve(batch_id).request_counts
    assert counts is not None
    assert (counts.total, counts.completed, counts.failed) == (100, 100, 0)
    run("bash", "-ec", load, cwd=tmp_path, **env)
    assert (tmp_path / "loadgen.html").stat().st_size > 0


def test_the_demo(model: Path, tmp_path: Path) -> None:
    command = ("neaptide", "demo", "--model", str(model), "--dir", str(tmp_path))
    said = run(*command, "--max-seconds", str(PATIENCE_S), cwd=tmp_path)
    print(said)
    found = re.search(r"^batch: (\d+) of (\d+) lines answered", said, re.MULTILINE)
    assert found is not None
    answered, total = map(int, found.groups())
    assert said.splitlines()[-1].startswith(("Co-serving ", "The benefit of co-serving is unknown"))
    # A machine with other work may not come to the last line within the demo's time: it must say so.
    assert (answered < total) == (f"of {total} lines done" in said)
    results = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert [line["response"]["status_code"] for line in results if line["response"]] == [200] * answered
