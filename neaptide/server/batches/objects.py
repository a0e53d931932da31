"""API objects of files and batches. All keys are always present, null if unset."""

from collections.abc import Sequence
from typing import cast

from neaptide.server.batches.running.deadline_status import BatchStatuses
from neaptide.server.batches.storing.models import BatchRecord, BatchStatus, FileRecord
from neaptide.server.openai.stored_replies import (
    Batch,
    BatchExtension,
    BatchList,
    BatchUsage,
    File,
    FileList,
    Page,
    PurposeName,
)


def file_object(record: FileRecord) -> File:
    return {
        "id": record.id,
        "object": "file",
        "bytes": record.num_bytes,
        "created_at": record.created_at,
        "expires_at": record.expires_at,
        "filename": record.filename,
        "purpose": cast(PurposeName, record.purpose),  # It was checked at the upload.
        "status": "processed",
        "status_details": None,
    }


def batch_object(record: BatchRecord, outlooks: BatchStatuses, waits_for: str | None = None) -> Batch:
    """The API object of a batch. ``waits_for`` is a sentence on what no present server has for it."""
    # The lines of a batch in validation are not known, so none are counted.
    started = record.in_progress_at is not None
    return {
        "id": record.id,
        "object": "batch",
        "endpoint": record.endpoint,
        "model": record.model,
        "errors": None if record.errors is None else {"object": "list", "data": record.errors},
        "input_file_id": record.input_file_id,
        "completion_window": record.completion_window,
        "status": record.status.value,
        "output_file_id": record.output_file_id,
        "error_file_id": record.error_file_id,
        "created_at": record.created_at,
        "in_progress_at": record.in_progress_at,
        "expires_at": record.expires_at,
        "finalizing_at": record.finalizing_at,
        "completed_at": record.completed_at,
        "failed_at": record.failed_at,
        "expired_at": record.expired_at,
        "cancelling_at": record.cancelling_at,
        "cancelled_at": record.cancelled_at,
        "request_counts": {
            "total": record.num_total if started else 0,
            "completed": record.num_completed if started else 0,
            "failed": record.num_failed if started else 0,
        },
        "usage": _usage(record) if record.status is not BatchStatus.VALIDATING else None,
        "metadata": record.metadata,
        "neaptide": _extension(record, outlooks, waits_for),
    }


def _extension(record: BatchRecord, outlooks: BatchStatuses, waits_for: str | None) -> BatchExtension | None:
    found = outlooks.of(record.id) if record.status is BatchStatus.IN_PROGRESS else None
    if found is None and waits_for is None and record.due_at is None:
        return None
    expected_s = None if found is None else found.expected_s
    shown: BatchExtension = {
        "outlook": None if found is None else found.outlook.value,
        "needed_seconds": None if found is None else round(found.needed_s, 1),
        "expected_seconds": None if expected_s is None else round(expected_s, 1),
        "left_seconds": None if found is None else round(found.left_s, 1),
        "waits_for": waits_for,
        "due_at": record.due_at,
    }
    return shown


def _usage(record: BatchRecord) -> BatchUsage:
    return {
        "input_tokens": record.input_tokens,
        "input_tokens_details": {"cached_tokens": record.cached_tokens},
        "output_tokens": record.output_tokens,
        "output_tokens_details": {"reasoning_tokens": record.reasoning_tokens},
        "total_tokens": record.input_tokens + record.output_tokens,
    }


def file_list(records: Sequence[FileRecord], has_more: bool) -> FileList:
    return {**_page(records, has_more), "data": [file_object(record) for record in records]}


def batch_list(records: Sequence[BatchRecord], has_more: bool, shown: list[Batch]) -> BatchList:
    return {**_page(records, has_more), "data": shown}


def _page(records: Sequence[FileRecord] | Sequence[BatchRecord], has_more: bool) -> Page:
    return {
        "object": "list",
        "first_id": records[0].id if records else None,
        "last_id": records[-1].id if records else None,
        "has_more": has_more,
    }
