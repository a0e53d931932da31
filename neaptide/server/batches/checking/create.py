"""Checks the body of ``POST /v1/batches``."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from neaptide.server.batches.checking.validate import ENDPOINTS
from neaptide.server.batches.storing.files import MAX_EXPIRY_S, MIN_EXPIRY_S
from neaptide.server.http.errors import InvalidRequestError

MAX_METADATA_PAIRS = 16
MAX_METADATA_KEY_CHARS = 64
MAX_METADATA_VALUE_CHARS = 512
LAST_UNIX_S = 1 << 40
"""Latest time that a batch may name."""


@dataclass(frozen=True, slots=True)
class CreateBatch:
    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[str, str] | None = None
    output_expires_after_s: int | None = None
    accept_by: int | None = None
    """Unix time by which the batch must be promised."""


def parse_create(body: Mapping[str, Any], windows: Sequence[str]) -> CreateBatch:
    """Checks the body; null counts as omitted. Raises InvalidRequestError for the first error."""
    for name in ("input_file_id", "endpoint", "completion_window"):
        if body.get(name) is None:
            raise InvalidRequestError(
                f"Missing required parameter: '{name}'.", param=name, code="missing_required_parameter"
            )
        if not isinstance(body[name], str):
            raise InvalidRequestError(f"'{name}' must be a string.", param=name, code="invalid_type")
    _check_choice("endpoint", body["endpoint"], ENDPOINTS)
    _check_choice("completion_window", body["completion_window"], windows)
    return CreateBatch(
        # Longer than any id, so it names no file; the column is not that long.
        input_file_id=body["input_file_id"][:64].replace("\0", ""),
        endpoint=body["endpoint"],
        completion_window=body["completion_window"],
        metadata=_metadata(body.get("metadata")),
        output_expires_after_s=_expiry(body.get("output_expires_after")),
        accept_by=_accept_by(body.get("accept_by")),
    )


def _accept_by(value: object) -> int | None:
    if value is None:
        return None
    if type(value) is not int or not 0 < value <= LAST_UNIX_S:
        raise InvalidRequestError("'accept_by' must be a unix time in seconds.", param="accept_by", code="invalid_type")
    return value


def _check_choice(name: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        values = ", ".join(f"'{choice}'" for choice in allowed)
        raise InvalidRequestError(
            f"Invalid value for '{name}'. Supported values are: {values}.", param=name, code="invalid_value"
        )


def _metadata(metadata: object) -> dict[str, str] | None:
    if metadata is None:
        return None
    if not isinstance(metadata, dict):
        raise InvalidRequestError("'metadata' must be an object.", param="metadata", code="invalid_type")
    if len(metadata) > MAX_METADATA_PAIRS:
        raise InvalidRequestError(
            f"'metadata' has at most {MAX_METADATA_PAIRS} keys.", param="metadata", code="invalid_value"
        )
    for key, value in metadata.items():
        param = f"metadata.{key}" if re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", key) else "metadata"
        if not isinstance(value, str):
            raise InvalidRequestError("A metadata value must be a string.", param=param, code="invalid_type")
        if len(key) > MAX_METADATA_KEY_CHARS or len(value) > MAX_METADATA_VALUE_CHARS or "\0" in key + value:
            raise InvalidRequestError("A metadata key or value is not valid.", param=param, code="invalid_value")
    return metadata


def _expiry(expiry: object) -> int | None:
    if expiry is None:
        return None
    seconds = expiry.get("seconds") if isinstance(expiry, dict) else None
    if not isinstance(expiry, dict) or expiry.get("anchor") != "created_at":
        raise InvalidRequestError(
            "'output_expires_after.anchor' must be created_at.",
            param="output_expires_after.anchor",
            code="invalid_value",
        )
    if type(seconds) is not int or not MIN_EXPIRY_S <= seconds <= MAX_EXPIRY_S:
        raise InvalidRequestError(
            f"'output_expires_after.seconds' must be between {MIN_EXPIRY_S} and {MAX_EXPIRY_S}.",
            param="output_expires_after.seconds",
            code="invalid_value",
        )
    return seconds
