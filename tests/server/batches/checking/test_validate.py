"""What makes a batch fail before anything runs, with the code and the physical line of each finding."""

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from neaptide.engine.offline.token_file import TokenFile
from neaptide.server.batches.checking.job_files import read_plan
from neaptide.server.batches.checking.validate import (
    Check,
    CheckReport,
    FileLimits,
    Validator,
    read_body,
    read_lines,
)
from neaptide.server.batches.storing.models import NewLine
from tests.server.batches.fake_compiler import FakeCompiler
from tests.server.batches.fakes import CHAT, Server, jsonl, line


def validate(tmp_path: Path, content: bytes, limits: FileLimits | None = None) -> tuple[CheckReport, list[NewLine]]:
    path = tmp_path / "input.jsonl"
    path.write_bytes(content)
    kept: list[NewLine] = []

    def keep(lines: Sequence[NewLine]) -> None:
        kept.extend(lines)

    check = Check(CHAT, str(path), str(tmp_path / "job"), limits or FileLimits())
    return Validator(check, FakeCompiler(), keep).run(), kept


def without(name: str) -> dict[str, Any]:
    entry = line("x")
    del entry[name]
    return entry


def with_body(**fields: Any) -> dict[str, Any]:
    entry = line("x")
    entry["body"] = {name: value for name, value in (entry["body"] | fields).items() if value is not ...}
    return entry


@pytest.mark.parametrize(
    ("bad", "code", "param"),
    [
        ("{", "invalid_json_line", None),
        ('{"custom_id": "x", "custom_id": "y"}', "invalid_json_line", "custom_id"),
        ('{"custom_id": NaN}', "invalid_json_line", "custom_id"),
        ('{"custom_id": "\\ud800"}', "invalid_json_line", "custom_id"),
        ("[" * 50_000, "invalid_json_line", None),
        ("[]", "invalid_request", None),
        ("3", "invalid_request", None),
        (without("custom_id"), "missing_required_parameter", "custom_id"),
        (without("method"), "missing_required_parameter", "method"),
        (without("url"), "missing_required_parameter", "url"),
        (without("body"), "missing_required_parameter", "body"),
        (line("x") | {"body": None}, "missing_required_parameter", "body"),
        (line("first"), "duplicate_custom_id", "custom_id"),
        (line("x") | {"custom_id": 3}, "invalid_type", "custom_id"),
        (line("x") | {"custom_id": "a\0b"}, "invalid_value", "custom_id"),
        (line("x") | {"custom_id": "a" * 513}, "invalid_value", "custom_id"),
        (line("x") | {"custom_id": ""}, "invalid_value", "custom_id"),
        (line("x") | {"method": "GET"}, "invalid_method", "method"),
        (line("x") | {"method": "PUT"}, "invalid_method", "method"),
        (line("x") | {"url": "/v1/completions"}, "invalid_url", "url"),
        (line("x") | {"body": []}, "invalid_type", "body"),
        (with_body(model="gpt"), "model_not_found", "body.model"),
        (with_body(model=7), "model_not_found", "body.model"),
        (with_body(model=...), "invalid_request", "body.model"),
        (with_body(model="m2"), "model_mismatch", "body.model"),
        (with_body(messages=...), "invalid_request", "body.messages"),
        (with_body(stream=True), "streaming_unsupported", "body.stream"),
    ],
)
def test_each_malformed_line(tmp_path: Path, bad: dict[str, Any] | str, code: str, param: str | None) -> None:
    report, _ = validate(tmp_path, jsonl([line("first"), "", "  \r", bad, line("last")]))
    assert [(e["code"], e["line"], e["param"]) for e in report.errors] == [(code, 4, param)]
    assert isinstance(report.errors[0]["message"], str)
    assert not list(tmp_path.glob("job*"))


def test_a_line_for_another_model_is_told_which_one_is_served(tmp_path: Path) -> None:
    report, _ = validate(tmp_path, jsonl([with_body(model="gpt")]))
    assert report.errors[0]["message"] == "The model of this line is not served here; this server serves 'm'."


def test_invalid_utf8_is_not_json(tmp_path: Path) -> None:
    report, _ = validate(tmp_path, b'{"custom_id": "\xff"}\n')
    assert [e["code"] for e in report.errors] == ["invalid_json_line"]


@pytest.mark.parametrize("content", [b"", b"\n\n", b"\xef\xbb\xbf", b" \t\r\n"])
def test_an_empty_file(tmp_path: Path, content: bytes) -> None:
    report, _ = validate(tmp_path, content)
    assert [(e["code"], e["line"]) for e in report.errors] == [("empty_file", None)]


def test_every_bad_line_is_listed_up_to_a_hundred(tmp_path: Path) -> None:
    report, _ = validate(tmp_path, b"x\n" * 250)
    assert [e["line"] for e in report.errors] == [*range(1, 101), None]
    assert (report.errors[-1]["code"], report.errors[-1]["message"]) == (
        "too_many_errors",
        "150 more errors are not listed.",
    )


TEXT = json.dumps(line("x") | {"body": {"seed": 1, "text": "caf\u00e9"}}, ensure_ascii=False)


@pytest.mark.parametrize(
    ("content", "words", "param"),
    [
        (TEXT.encode("utf-16"), "the file is UTF-16; save it as UTF-8", None),
        (TEXT.encode("utf-16-le"), "there is a NUL at byte 2; UTF-16 has many", None),
        (TEXT.encode("latin-1"), "is not UTF-8; save the file as UTF-8", None),
        (gzip.compress(TEXT.encode()), "compressed with gzip; upload it uncompressed", None),
        (json.dumps(line("x"), indent=2).encode(), "a request is one line, not JSON over several lines", None),
        (TEXT[:20].encode(), "it ends too early", None),
        (TEXT.encode() + b"\r" + TEXT.encode(), "its line ends are CR alone", None),
        (TEXT.replace(",", ";", 1).encode(), "Expecting ',' delimiter, at character 18", None),
        (TEXT.replace("1,", "NaN,").encode(), "not finite or does not fit 64 bits", "body.seed"),
        (TEXT.replace("1,", f"{2**64},").encode(), "not finite or does not fit 64 bits", "body.seed"),
        (TEXT.replace("caf\u00e9", "\\ud800").encode(), "lone surrogate", "body.text"),
        (TEXT.replace('"text"', '"seed"').encode(), "duplicate keys", "seed"),
        (TEXT.replace("caf", "\0").encode(), "there is a NUL at byte", None),
    ],
)
def test_a_line_that_cannot_be_read_is_told_why_and_where(
    content: bytes, words: str, param: str | None, tmp_path: Path
) -> None:
    report, _ = validate(tmp_path, content + b"\n")
    first = report.errors[0]
    assert words in first["message"]
    assert first["message"].startswith("This line is not parseable as valid JSON: ")
    assert (first["code"], first["line"], first["param"]) == ("invalid_json_line", 1, param)


def test_too_many_lines(tmp_path: Path) -> None:
    report, _ = validate(tmp_path, jsonl(line(f"c{i}") for i in range(4)), FileLimits(max_lines=3))
    assert [(e["code"], e["line"]) for e in report.errors] == [("too_many_tasks", None)]


def test_too_many_lines_are_told_before_one_is_tokenized(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeCompiler, "compile", lambda *_: pytest.fail("tokenized"))
    report, _ = validate(tmp_path, jsonl(line(f"c{i}") for i in range(4)), FileLimits(max_lines=3))
    assert [e["code"] for e in report.errors] == ["too_many_tasks"]


def test_too_many_prompt_tokens(tmp_path: Path) -> None:
    report, _ = validate(tmp_path, jsonl([line("a", "x" * 60), line("b", "x" * 60)]), FileLimits(max_prompt_tokens=100))
    assert [e["code"] for e in report.errors] == ["token_limit_exceeded"]


def test_what_is_well_formed_becomes_rows(tmp_path: Path) -> None:
    lines: list[dict[str, Any] | str] = [
        line("a", "x\\u2028y", n=2),
        "",
        line("hot", temperature=9),
        line("b", max_tokens=3, stop="!"),
    ]
    content = b"\xef\xbb\xbf" + jsonl(lines).replace(b"\n", b"\r\n").removesuffix(b"\r\n")
    report, kept = validate(tmp_path, content)
    assert report.errors == []
    assert (report.num_lines, report.num_rows, report.model) == (3, 3, "m")
    assert [(k.line_no, k.custom_id, k.first_row, k.num_rows) for k in kept] == [
        (1, "a", 0, 2),
        (3, "hot", 2, 0),
        (4, "b", 2, 1),
    ]
    assert kept[1].result is not None
    assert (kept[1].result.status_code, json.loads(kept[1].result.body)["error"]["param"]) == (400, "temperature")
    for entry, wanted in zip(kept, (lines[0], lines[2], lines[3]), strict=True):
        assert isinstance(wanted, dict)
        with (tmp_path / "input.jsonl").open("rb") as file:
            assert read_body(file, entry.byte_offset, entry.num_bytes) == wanted["body"]
    tokens, plan = TokenFile(tmp_path / "job"), read_plan(tmp_path / "job")
    assert [bytes(tokens.prompt(row)) for row in range(3)] == [b"x\\u2028y"] * 2 + [b"text of b"]
    assert plan.stream_rows == [2]
    assert [plan.params_table[i].max_tokens for i in plan.params_index] == [16, 16, 3]
    assert len(plan.params_table) == 2


def test_lines_split_at_newlines_only(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes("a\u2028b\x0bc\rd\ne".encode())
    assert [(raw.line_no, raw.content.decode()) for raw in read_lines(path)] == [(1, "a\u2028b\x0bc\rd"), (2, "e")]


def test_an_overlong_line_is_not_held_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("neaptide.server.batches.checking.validate.MAX_BODY_BYTES", 400)
    report, _ = validate(tmp_path, jsonl([line("a"), line("b", "x" * 5000), line("c"), "["]))
    assert [(e["code"], e["line"]) for e in report.errors] == [("invalid_request", 2), ("invalid_json_line", 4)]
    lengths = [len(raw.content) for raw in read_lines(tmp_path / "input.jsonl")]
    assert max(lengths) <= 402


# ---- through the service --------------------------------------------------------------------------------


async def test_one_bad_line_fails_the_batch_and_nothing_runs(tmp_path: Path) -> None:
    async with Server(tmp_path) as server:
        batch = await server.create(jsonl([line(f"c{i}") for i in range(600)]) + b"oops\n")
        record = await server.until_status(batch.id, "failed")
        assert record.errors == [
            {
                "code": "invalid_json_line",
                "line": 601,
                "message": "This line is not parseable as valid JSON: Expecting value, at character 1.",
                "param": None,
            }
        ]
        assert record.failed_at is not None
        assert record.num_total == 0
        assert server.engine.sent == []


async def test_an_unknown_or_foreign_file_fails_later_not_at_create(tmp_path: Path) -> None:
    async with Server(tmp_path) as server:
        foreign = await server.upload(jsonl([line("a")]), owner="other")
        for file_id in ("file-unknown", foreign.id):
            batch = await server.create(input_file_id=file_id)
            record = await server.until_status(batch.id, "failed")
            assert record.errors is not None
            assert (record.errors[0]["code"], record.errors[0]["param"]) == ("invalid_request", "file_id")


async def test_a_bug_in_validation_fails_one_batch_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object) -> None:
        raise ZeroDivisionError

    async with Server(tmp_path) as server:
        with monkeypatch.context() as patch:
            patch.setattr(server.compiler, "compile", broken)
            batch = await server.create(jsonl([line("a")]))
            record = await server.until_status(batch.id, "failed")
        assert record.errors is not None
        assert record.errors[0]["code"] == "internal_error"
        server.engine.auto = True
        batch = await server.create(jsonl([line("a")]))
        await server.until_status(batch.id, "completed")
