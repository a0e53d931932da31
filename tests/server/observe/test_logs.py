"""The form of the log: a line for each record, whatever is in it."""

import json
import logging
import subprocess
import sys

import pytest

from neaptide.server.observe.logs import JsonFormatter, TextFormatter, resolved
from neaptide.server.observe.request_log import CallRecord, RequestRecord

NASTY = "a\r\nINFO forged\x1b[31m\x00\x7f\x85\u2028b"
FORMATTERS = (JsonFormatter(), TextFormatter())


def record(message: str, exc: Exception | None = None) -> logging.LogRecord:
    found = logging.LogRecord("n", logging.INFO, "f.py", 1, "%s", (message,), (type(exc), exc, None) if exc else None)
    found.created, found.msecs = 1_700_000_000.25, 250.0
    return found


def test_a_json_line_says_when_how_grave_and_who() -> None:
    line = json.loads(JsonFormatter().format(record("hello")))
    assert (line["time"], line["level"], line["logger"]) == ("2023-11-14T22:13:20.250Z", "info", "n")
    assert line["message"] == "hello"
    assert isinstance(line["pid"], int)


def test_a_requests_fields_stand_in_the_json_line() -> None:
    found = record("")
    found.request = RequestRecord(request_id="r", endpoint="/e", tier="flex", model="m", outcome="ok", queue_ms=1.5)
    line = json.loads(JsonFormatter().format(found))
    assert "message" not in line
    assert {"request_id": "r", "tier": "flex", "outcome": "ok", "queue_ms": 1.5}.items() <= line.items()


def test_a_request_is_told_to_people_in_words() -> None:
    found = record("")
    found.request = RequestRecord(
        request_id="r",
        engine_id="abc",
        endpoint="/v1/chat/completions",
        tier="default",
        model="m",
        outcome="ok",
        prompt_tokens=13,
        completion_tokens=8,
        queue_ms=1.5,
        ttft_ms=151.2,
        e2e_ms=900.0,
        key="681437d9",
    )
    found.name = "neaptide.requests"
    line = TextFormatter().format(found)
    said = "/v1/chat/completions ok default 13+8 tokens queue 2 ms ttft 151 ms total 900 ms key 681437d9 abc"
    assert line[8:] == f" INFO {said}"


@pytest.mark.parametrize(
    ("method", "endpoint", "outcome", "level"),
    [
        ("GET", "/v1/batches/{batch_id}", "ok", logging.DEBUG),
        ("GET", "/v1/batches", "ok", logging.DEBUG),
        ("GET", "/v1/batches/{batch_id}", "client_error", logging.INFO),
        ("GET", "/v1/files/{file_id}/content", "ok", logging.INFO),
        ("POST", "/v1/batches", "ok", logging.INFO),
        ("DELETE", "/v1/files/{file_id}", "ok", logging.INFO),
    ],
)
def test_a_look_at_a_batch_is_a_line_for_debugging(method: str, endpoint: str, outcome: str, level: int) -> None:
    call = CallRecord(
        request_id="r",
        endpoint=endpoint,
        method=method,
        object_id=None,
        status=200,
        outcome=outcome,
        sent_bytes=1,
        e2e_ms=2.0,
    )
    assert call.level == level


@pytest.mark.parametrize(("is_terminal", "form"), [(True, "text"), (False, "json")])
def test_a_terminal_gets_text(monkeypatch: pytest.MonkeyPatch, is_terminal: bool, form: str) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal, raising=False)
    assert (resolved("auto"), resolved("json"), resolved("text")) == (form, "json", "text")


@pytest.mark.acceptance("A28", "control characters in log messages and tracebacks, both forms of the log", count=2)
@pytest.mark.parametrize("formatter", FORMATTERS)
def test_control_characters_are_escaped(formatter: logging.Formatter) -> None:
    line = formatter.format(record(NASTY))
    assert line.isprintable()
    assert "\\u001b" in line
    with_traceback = formatter.format(record("x", ValueError(NASTY)))
    assert with_traceback.replace("\n", "").isprintable()


@pytest.mark.parametrize("form", ["json", "text"])
def test_everything_in_a_process_has_the_same_form(form: str) -> None:
    program = (
        "import logging, warnings\n"
        "from neaptide.server.observe.logs import configure_logging\n"
        f"configure_logging('info', '{form}')\n"
        "logging.getLogger('uvicorn.error').warning('from the web server')\n"
        "logging.getLogger('uvicorn.error').info('it has started, as we say ourselves')\n"
        "logging.getLogger('neaptide.engine.process.loop').warning('from the engine')\n"
        "logging.getLogger('alembic.x').info('migrations are chatty')\n"
        "warnings.warn('look')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    lines = done.stderr.splitlines()
    if form == "json":
        assert [json.loads(line)["level"] for line in lines] == ["warning", "warning", "warning"]
    else:
        assert "WARNING uvicorn.error: from the web server" in lines[0]
        assert "WARNING from the engine" in lines[1]
    assert len(lines) == 3
