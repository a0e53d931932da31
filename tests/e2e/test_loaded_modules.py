"""What the processes of a single server load, and what they do not."""

import subprocess
import sys
from pathlib import Path

import openai

from tests.e2e.server import RunningServer
from tools.size import CLUSTER, closure, sources

NOTE_IMPORTS = """
import os, sys

class NoteImports:
    def find_spec(self, name, path=None, target=None):
        if name.startswith("neaptide"):
            with open(os.environ["IMPORTS_NOTED_IN"], "a") as file:
                file.write(f"{os.getpid()} {name}\\n")

sys.meta_path.insert(0, NoteImports())
"""
"""A module that Python imports at the start of every process."""
REPOSITORY = Path(__file__).parents[2]
COMMAND_LINE = ("neaptide.__main__", "neaptide.cli", "neaptide.commands", "neaptide.server.client_variables")
FORBIDDEN = (CLUSTER, "neaptide.simulation", "neaptide_lab")
SCHEMA = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "integer"}}}


def test_a_single_server_loads_no_module_of_the_cluster_the_laboratory_or_the_simulation(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(NOTE_IMPORTS)
    noted = tmp_path / "imports"
    env = {"PYTHONPATH": str(tmp_path), "IMPORTS_NOTED_IN": str(noted)}
    flags = ["--dtype", "float32", "--profile", "cpu-neaptide-tiny", "--max-model-len", "2048"]
    with RunningServer(tmp_path, *flags, env=env) as server:
        with openai.OpenAI(base_url=server.base_url, api_key="none", max_retries=0) as client:
            use(server, client)
    loaded: dict[str, set[str]] = {}
    for line in noted.read_text().splitlines():
        process, name = line.split()
        loaded.setdefault(process, set()).add(name)
    # The child that replays recorded traffic needs the simulation; it has a test of its own.
    serving = [names for names in loaded.values() if "neaptide.launch.simulating" not in names]
    assert len(serving) >= 4, "the API, the engine, the child that checks files, and the one that compiles grammars"
    found = set().union(*serving)
    assert {name for name in found if name.startswith(FORBIDDEN)} == set()
    counted = closure(sources(REPOSITORY, "neaptide"), without=CLUSTER)
    assert {name for name in found - counted if not name.startswith(COMMAND_LINE)} == set()


def use(server: RunningServer, client: openai.OpenAI) -> None:
    """Asks for something of everything, so that every process has begun."""
    messages = [{"role": "user", "content": "What is 2+2?"}]
    asked = {"model": "neaptide-tiny", "messages": messages, "max_tokens": 2}
    client.chat.completions.create(**asked, response_format=SCHEMA)  # type: ignore[call-overload]
    line = b'{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"model": "neaptide-tiny", '
    line += b'"prompt": "2+2=", "max_tokens": 2}}\n'
    file = client.files.create(file=("lines.jsonl", line), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
    server.wait_for(lambda: client.batches.retrieve(batch.id).status == "completed")


def test_the_child_that_replays_traffic_loads_no_module_of_the_cluster_or_the_laboratory() -> None:
    code = "import neaptide.launch.simulation_answers, sys; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    assert "neaptide.simulation.recorded.shadow" in loaded
    others = [one for one in FORBIDDEN if one != "neaptide.simulation"]
    assert [name for name in loaded if name.startswith(tuple(others))] == []
