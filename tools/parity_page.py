"""Writes ``docs/openai-parity.md``: ``python -m tools.parity_page``. Each cell is what a server does with the field. A
test checks the page."""

import asyncio
import json
import tempfile
from collections.abc import Iterable
from pathlib import Path

import openai

from tests.server.parity.asking import Asking, Outcome, asking
from tests.server.parity.cases import (
    GENERATION,
    OPENAI,
    OTHERS,
    Case,
    Form,
    forms_of_values,
    stored_forms,
)
from tests.server.parity.client_fields import calls, fields_of

PAGE = Path(__file__).parents[1] / "docs" / "openai-parity.md"
NO_FIELD = "-"
HEAD = f"""# OpenAI parity

```sh
python -m tools.parity_page        # asks a server, and writes this page
```

What comes of each field of OpenAI's API. The tool sends each request twice, with the field and without it, and compares
the replies and what the engine was asked for. The fields are those of the Python client `openai` {openai.__version__},
and those that users of vLLM and SGLang send. [API](api.md) says what the fields do. Do not edit this page by hand.

| word | meaning |
|---|---|
| taken | It changes what runs or what comes back. |
| refused | The answer is 400, and `param` names the field. |
| ignored | It changes nothing; the last column says why that is right. |
| {NO_FIELD} | OpenAI has no such field there. It changes nothing. |
"""
_CALLS_HEAD = "chat completions | completions | responses | why it is ignored |\n|---|---|---|---|---|---|\n"
_FORMS_HEAD = "| call | place | taken | ignored | refused |\n|---|---|---|---|---|\n"


async def page() -> str:
    """The whole page."""
    with tempfile.TemporaryDirectory() as directory:
        async with asking(Path(directory)) as asked:
            parts = [
                HEAD,
                "\n## Fields of OpenAI\n\n| field | sent | " + _CALLS_HEAD,
                *[await _row(asked, case) for case in OPENAI],
                "\n## Forms of values\n\n" + _FORMS_HEAD,
                *await _form_rows(asked, forms_of_values()),
                "\n## Fields of vLLM and SGLang, and our own\n\n| field | sent | " + _CALLS_HEAD,
                *[await _row(asked, case) for case in OTHERS],
                "\n## Files and batches\n\n" + _FORMS_HEAD,
                *await _form_rows(asked, stored_forms(*await _newest(asked))),
                await _paths(asked),
            ]
    return "".join(parts)


async def _row(asked: Asking, case: Case) -> str:
    cells = [await _cell(asked, case, call) for call in GENERATION]
    shown = case.shown or f"`{json.dumps(case.sent(GENERATION[0]))}`"
    why = case.why if Outcome.IGNORED in cells else ""
    return f"| `{case.field}` | {shown} | {' | '.join(cells)} | {why} |\n"


async def _cell(asked: Asking, case: Case, call: str) -> str:
    asked.say(case.says)
    outcome = await asked.outcome(call, case.field, *case.requests(call))
    is_field = case.field in fields_of(call) or (case in OTHERS and call in case.calls)
    if outcome is Outcome.IGNORED and not is_field:
        return NO_FIELD
    if outcome is Outcome.IGNORED:
        _reason(case, call)
    return outcome


async def _form_rows(asked: Asking, forms: Iterable[Form]) -> list[str]:
    """A row for each place: its forms, by what comes of them."""
    rows: dict[tuple[str, str], dict[Outcome, list[str]]] = {}
    for place, name, case in forms:
        asked.say(case.says)
        (call,) = case.calls
        outcome = await asked.outcome(call, case.field, *case.requests(call))
        shown = f"`{name}`" if name else "yes"
        if outcome is Outcome.IGNORED:
            shown += f" ({_reason(case, call)})"
        rows.setdefault((call, place), {one: [] for one in Outcome})[outcome].append(shown)
    return [_form_row(call, place, row.values()) for (call, place), row in rows.items()]


def _form_row(call: str, place: str, cells: Iterable[list[str]]) -> str:
    where = f"`{place.replace(' of ', '` of `')}`"
    return f"| `{call}` | {where} | {' | '.join(', '.join(names) for names in cells)} |\n"


def _reason(case: Case, call: str) -> str:
    """Why it is right to ignore the field. Raises ValueError if nothing says so."""
    if not case.why:
        raise ValueError(f"{call} ignores {case.field}, and nothing says why")
    return case.why


async def _newest(asked: Asking) -> tuple[str, str]:
    """Makes two files and two batches; ids of the newer ones."""
    file_id = batch_id = ""
    for _ in range(2):
        upload = await asked.http.post("/v1/files", data={"purpose": "batch"}, files={"file": ("in.jsonl", b"{}\n")})
        file_id = upload.json()["id"]
        create = {"input_file_id": file_id, "endpoint": GENERATION[0], "completion_window": "24h"}
        batch_id = (await asked.http.post("/v1/batches", json=create)).json()["id"]
    return file_id, batch_id


async def _paths(asked: Asking) -> str:
    offered, missing = [], set()
    for method, path in calls():
        reply = await asked.http.request(method, path)
        if reply.status_code == 405 or (reply.status_code == 404 and reply.json()["error"]["code"] == "unknown_url"):
            missing.add(path.split("/")[2])
        else:
            offered.append(f"`{method} {path.replace('/x', '/{id}')}`")
    also = missing - {call.split("/")[2].rstrip("`") for call in offered}
    return (
        f"\n## Calls\n\nOffered: {', '.join(offered)}.\n\n"
        "Every other call of the client is answered 404 `unknown_url` or 405 `method_not_allowed`. These are all\n"
        f"calls of {', '.join(f'`{name}`' for name in sorted(also))}; and those that read or change stored chats and\n"
        "responses.\n"
    )


if __name__ == "__main__":
    PAGE.write_text(asyncio.run(page()), encoding="utf-8")
