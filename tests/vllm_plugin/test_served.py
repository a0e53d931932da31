from tests.vllm_plugin.server import *
from tests.e2e.server import *

pytestmark = needs_plugin
from pathlib import Path


def asking(i, **more):
    return {
        "model": MODEL,
        "messages": [{"role": "user", "content": f"What is {i % 90} + {i % 7}?"}],
        "temperature": 0,
        **more,
    }


def test_first(tmp_path: Path) -> None:
    with VllmServer(tmp_path) as server:
        batch = wait_terminal(server, submit_batch(server, [asking(i) for i in range(20)]))
        print(batch)
        for line in result_lines(server, batch)[:3]:
            print(line)
        print(server.log[-6000:])
        fam = server.family
        print(fam)
