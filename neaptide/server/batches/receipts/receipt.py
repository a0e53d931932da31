"""The receipt of a batch: what was promised, what it cost, and what its time went to."""

import hashlib
import hmac
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from neaptide.engine.private_files import private_opener
from neaptide.server.batches.receipts.sums import BatchSums
from neaptide.server.batches.storing.data_dir import RECEIPT_KEY, sync_directory
from neaptide.server.batches.storing.models import BatchRecord
from neaptide.server.openai.stored_replies import ReceiptPromise, UnsignedReceipt

KEY_BYTES = 32
CHECKING = "checking"
NOT_RECORDED = "not_recorded"


def receipt_of(record: BatchRecord, sums: BatchSums) -> UnsignedReceipt:
    """The receipt of an ended batch. It adds nothing that could change later."""
    ends = (record.completed_at, record.failed_at, record.expired_at, record.cancelled_at)
    ended_at = next(at for at in ends if at is not None)
    begun_at = ended_at if record.in_progress_at is None else record.in_progress_at
    time_s = {CHECKING: float(begun_at - record.created_at)} | sums.time_s
    missing_s = ended_at - record.created_at - sum(time_s.values())
    # Without the records of a server that was killed or did not run; clocks count the ends in whole seconds.
    time_s[NOT_RECORDED] = time_s.get(NOT_RECORDED, 0.0) + max(missing_s, 0.0)
    promise: ReceiptPromise | None = None
    if record.due_at is not None:
        is_kept = record.completed_at is not None and record.completed_at <= record.due_at
        promise = {"due_at": record.due_at, "kept": is_kept, "early_seconds": record.due_at - ended_at}
    is_unknown = not sums.computed_s and record.num_completed > 0  # An engine that charges nothing, as inside vLLM.
    return {
        "object": "batch.receipt",
        "id": record.id,
        "key": record.owner[:8],
        "model": record.model,
        "status": record.status.value,
        "created_at": record.created_at,
        "ended_at": ended_at,
        "expires_at": record.expires_at,
        "promise": promise,
        "lines": {"total": record.num_total, "completed": record.num_completed, "failed": record.num_failed},
        "tokens": {
            "prompt": record.input_tokens,
            "answers": record.output_tokens,
            "found_in_cache": sums.cached_tokens,
            "prefill_share": round(sums.prefill_tokens),
            "computed_prefill": sums.computed_tokens,
            "computed_decode": sums.decode_tokens,
            "computed_again": sums.recomputed_tokens,
        },
        "device_seconds": None if is_unknown else round(sums.device_s, 3),
        "computed_device_seconds": None if is_unknown else round(sums.computed_s, 3),
        "preemptions": sums.num_preemptions,
        "time_seconds": {name: round(seconds, 1) for name, seconds in time_s.items() if round(seconds, 1)},
    }


class Seal:
    """Hashes that only this data directory's server can make. Blocking.

    Args:
        key: its secret.
    """

    def __init__(self, key: bytes) -> None:
        self._key = key

    @classmethod
    def of_directory(cls, data_dir: Path) -> "Seal":
        """The seal of a data directory; a new one if it has none. Raises OSError."""
        path = data_dir / RECEIPT_KEY
        try:
            key = bytes.fromhex(path.read_text("ascii"))
            if len(key) == KEY_BYTES:
                return cls(key)
        except FileNotFoundError:
            pass
        except ValueError:  # A disk that failed has damaged it. Receipts of before are confirmed no more.
            path.replace(path.with_name(f"{RECEIPT_KEY}.damaged"))
        key, temporary = secrets.token_bytes(KEY_BYTES), path.with_name(f"{RECEIPT_KEY}.tmp")
        with open(temporary, "w", opener=private_opener) as file:
            file.write(key.hex())
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_directory(data_dir)
        return cls(key)

    def hash_of(self, receipt: Mapping[str, Any]) -> str:
        """HMAC-SHA256 of a receipt without its hash, whatever the order of its members and the form of its numbers."""
        text = msgspec.json.encode(_plain({name: value for name, value in receipt.items() if name != "hash"}))
        return hmac.new(self._key, text, hashlib.sha256).hexdigest()

    def confirms(self, receipt: Mapping[str, Any]) -> bool:
        """Whether this server has made the receipt as it is."""
        given = receipt.get("hash")
        return isinstance(given, str) and hmac.compare_digest(given.encode(), self.hash_of(receipt).encode())


def _plain(value: Any) -> Any:
    """The value with sorted members and whole numbers without a fraction, as other languages write them."""
    if isinstance(value, Mapping):
        return {name: _plain(value[name]) for name in sorted(value)}
    if isinstance(value, list):
        return [_plain(one) for one in value]
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value
