"""A policy in a file outside the tree, the example of docs/write-a-policy.md, under every command."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from neaptide.engine.record.step_log import HeaderLine, read_log
from tests.e2e.server import RunningServer, get_batch, submit_batch

REPOSITORY = Path(__file__).parents[2]
EXAMPLE = REPOSITORY / "examples" / "own_policy.py"
POLICY = "own_policy:ShortestFirst"
BODY = {"model": "neaptide-tiny", "messages": [{"role": "user", "content": "What is 3 + 4?"}], "max_tokens": 8}


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A directory with the example, and a trace of four chats."""
    directory = tmp_path / "home"
    directory.mkdir()
    shutil.copy(EXAMPLE, directory)
    lines = [f"{0.5 * number},{40 - 9 * number},5,a\n" for number in range(4)]
    (directory / "trace.csv").write_text("arrival_s,input_tokens,output_tokens,client\n" + "".join(lines))
    return directory


def neaptide(home: Path, *words: str, cwd: Path | None = None) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-P", "-m", "neaptide", *words, "--policy", POLICY]
    environment = os.environ | ({} if cwd is None else {"PYTHONPATH": str(home)})
    return subprocess.run(command, cwd=cwd or home, env=environment, capture_output=True, text=True, check=False)


def test_the_page_shows_the_example_whole() -> None:
    page, example = (REPOSITORY / "docs" / "write-a-policy.md").read_text(), EXAMPLE.read_text()
    assert f"```python\n{example}```" in page
    assert len(example.splitlines()) < 60
    assert set(re.findall(r"from neaptide[.\w]*", example)) == {"from neaptide.policy"}


def test_it_is_simulated(home: Path) -> None:
    flags = ["--online", "trace.csv", "--offline", "none", "--profile", "cpu-111m"]
    done = neaptide(home, "simulate", *flags)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert (result["policy"], result["online"]["requests"]) == (POLICY, 4)


def test_it_is_planned_with(home: Path, tmp_path: Path) -> None:
    """From another directory: ``PYTHONPATH`` names that of the file."""
    flags = ["--online", str(home / "trace.csv"), "--profile", "cpu-111m", "--ttft-slo-s", "9", "--tpot-slo-s", "9"]
    done = neaptide(home, "plan", *flags, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["policy"] == POLICY


def test_it_serves_chats_and_a_batch(home: Path, tmp_path: Path) -> None:
    log = tmp_path / "steps.jsonl"
    flags = ["--policy", POLICY, "--step-log", str(log), "--dtype", "float32", "--profile", "cpu-neaptide-tiny"]
    with RunningServer(tmp_path, *flags, cwd=home) as server:
        reply = server.http.post("/v1/chat/completions", json=BODY)
        assert reply.status_code == 200
        batch_id = submit_batch(server, [BODY] * 3)
        server.wait_for(lambda: get_batch(server, batch_id)["status"] == "completed")
        assert get_batch(server, batch_id)["request_counts"] == {"total": 3, "completed": 3, "failed": 0}
    header = next(iter(read_log(log)))
    assert isinstance(header, HeaderLine)
    assert header.scheduler.policy == POLICY


@pytest.mark.parametrize(
    ("policy", "said"),
    [
        (
            "own_policy:Longest",
            "the policy 'own_policy:Longest' cannot be loaded: the module own_policy has no 'Longest'",
        ),
        ("other:Any", "the policy 'other:Any' cannot be loaded: no module 'other' among the installed packages"),
        ("shortest", "there is no policy 'shortest'; there are: "),
    ],
)
def test_what_is_wrong_with_it_is_one_line(home: Path, tmp_path: Path, policy: str, said: str) -> None:
    command = [
        sys.executable,
        "-P",
        "-m",
        "neaptide",
        "serve",
        "--policy",
        policy,
        "--data-dir",
        str(tmp_path / "data"),
    ]
    done = subprocess.run(command, cwd=home, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    (line,) = (line for line in done.stderr.splitlines() if "polic" in line)
    assert line.startswith("neaptide serve: ")
    assert said in line
