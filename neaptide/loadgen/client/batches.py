"""Submits batch files over HTTP, like any client of the batches API."""

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import httpx

TERMINAL = frozenset({"completed", "failed", "expired", "cancelled"})
VALIDATION_POLL_S = 0.2


class BatchClientError(Exception):
    """The server accepted the file and then rejected the batch."""


def endpoint_of(content: bytes) -> str:
    """The endpoint that a batch file's first line names.

    Raises ValueError if the first line names none.
    """
    try:
        url = json.loads(content[: content.find(b"\n")] if b"\n" in content else content)["url"]
    except (ValueError, KeyError, TypeError):
        raise ValueError("the first line is not a batch request: it has no url") from None
    return str(url)


async def submit_batch(http: httpx.AsyncClient, name: str, content: bytes, window: str = "24h") -> dict[str, Any]:
    """Uploads the file and creates the batch. Raises httpx.HTTPError, and ValueError like ``endpoint_of``."""
    endpoint = endpoint_of(content)
    files = {"file": (name, content, "application/jsonl")}
    upload = (await http.post("/v1/files", files=files, data={"purpose": "batch"})).raise_for_status().json()
    body = {"input_file_id": upload["id"], "endpoint": endpoint, "completion_window": window}
    batch: dict[str, Any] = (await http.post("/v1/batches", json=body)).raise_for_status().json()
    return batch


async def get_batch(http: httpx.AsyncClient, batch_id: str) -> dict[str, Any]:
    batch: dict[str, Any] = (await http.get(f"/v1/batches/{batch_id}")).raise_for_status().json()
    return batch


async def wait_until_it_runs(http: httpx.AsyncClient, batch: dict[str, Any]) -> dict[str, Any]:
    """Waits until the file is validated. Raises BatchError if the batch has ended by then without success."""
    while batch["status"] == "validating":
        await asyncio.sleep(VALIDATION_POLL_S)
        batch = await get_batch(http, batch["id"])
    if batch["status"] in TERMINAL - {"completed"}:
        raise BatchClientError(f"the batch is {batch['status']}: {'; '.join(errors_of(batch)) or 'no reason given'}")
    return batch


def errors_of(batch: Mapping[str, Any], most: int = 3) -> list[str]:
    """Readable errors of the batch and its lines."""
    found = (batch["errors"] or {}).get("data") or []
    said = [
        (f"line {entry['line']}: " if entry["line"] is not None else "") + f"{entry['message']} ({entry['code']})"
        for entry in found[:most]
    ]
    return said + ([f"{len(found) - most} more"] if len(found) > most else [])
