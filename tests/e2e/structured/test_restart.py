"""An engine that dies with grammars in hand: what the next one answers follows them all the same."""

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.server import RunningServer, get_batch, result_lines, submit_batch, wait_terminal
from tests.e2e.structured.test_formats import FORMAT, QUESTION, Point

NUM_LINES = 60


@pytest.mark.full
def test_lines_of_a_killed_engine_have_their_form(tmp_path: Path) -> None:
    asked: dict[str, Any] = {"model": "neaptide-tiny", "messages": QUESTION, "response_format": FORMAT}
    bodies = [asked | {"max_tokens": 300, "temperature": 1, "seed": seed} for seed in range(NUM_LINES)]
    # So few at once that they do not all end between two looks.
    with RunningServer(tmp_path, "--max-model-len", "1024", "--max-num-seqs", "4") as server:
        batch_id = submit_batch(server, bodies)
        server.wait_for(lambda: get_batch(server, batch_id)["request_counts"]["completed"] >= NUM_LINES // 6)
        engine = server.engine
        engine.kill()
        assert get_batch(server, batch_id)["request_counts"]["completed"] < NUM_LINES
        server.wait_for_another_engine(engine)
        batch = wait_terminal(server, batch_id)
        assert batch["request_counts"] == {"total": NUM_LINES, "completed": NUM_LINES, "failed": 0}
        for line in result_lines(server, batch):
            (choice,) = line["response"]["body"]["choices"]
            assert choice["finish_reason"] == "stop"
            Point.model_validate_json(choice["message"]["content"])
