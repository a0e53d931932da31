"""A process that writes rows to an SQLite store, says after each what it was told, and ends without closing anything.

python -m tests.server.batches.storing.databases.failing_disk_victim DIRECTORY COUNT
"""

import os
import sys
from dataclasses import replace
from pathlib import Path

from neaptide.server.batches.storing import file_rows
from neaptide.server.batches.storing.models import FileRecord
from neaptide.server.batches.storing.store import Store, StoreUnavailableError, WriteUnknownError

FILE = FileRecord("", "", "a.jsonl", "batch", 3, "0" * 64, 100, None)


def main(data_dir: Path, count: int) -> None:
    store = Store(data_dir)
    store.open()
    for number in range(count):
        # Some take more frames of the log than what comes after them overwrites.
        records = [replace(FILE, id=f"file-{number}-{part}") for part in range(1 if number % 3 else 200)]
        try:
            store.write_blocking(lambda conn, records=records: file_rows.insert_output_files(conn, records))
            told = "yes"
        except WriteUnknownError:
            told = "unknown"
        except StoreUnavailableError:
            told = "no"
        print(told, len(records), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
