"""Tables of files and batches, the same in SQLite and in PostgreSQL.

Times are whole unix seconds. ``migrations/`` creates these tables; a test keeps the two equal.
"""

import sqlalchemy as sa

metadata = sa.MetaData()

files = sa.Table(
    "files",
    metadata,
    # Creation order, the sort key of lists, because several objects may share one created_at second.
    sa.Column("seq", sa.Integer, primary_key=True, autoincrement=True),
    sa.Column("id", sa.String(64), nullable=False, unique=True),
    sa.Column("owner", sa.String(128), nullable=False),
    sa.Column("filename", sa.String(255), nullable=False),
    sa.Column("purpose", sa.String(32), nullable=False),
    sa.Column("num_bytes", sa.BigInteger, nullable=False),
    sa.Column("sha256", sa.String(64), nullable=False),
    sa.Column("created_at", sa.BigInteger, nullable=False),
    sa.Column("expires_at", sa.BigInteger),
    # Key of the bytes on shared storage; null if they are in the data directory.
    sa.Column("blob", sa.String(255)),
    # Model that the first line of a batch file names; null if unknown.
    sa.Column("model", sa.String(255)),
    sa.Index("files_by_owner", "owner", "seq"),
    sqlite_autoincrement=True,
)

# Remaining work on deleted files (bytes, results), and for a while their places in lists.
deleted_files = sa.Table(
    "deleted_files",
    metadata,
    sa.Column("id", sa.String(64), primary_key=True),
    sa.Column("owner", sa.String(128), nullable=False),
    sa.Column("seq", sa.Integer, nullable=False),
    sa.Column("deleted_at", sa.BigInteger, nullable=False),
    sa.Column("is_swept", sa.Boolean, nullable=False),
    sa.Column("blob", sa.String(255)),
)

batches = sa.Table(
    "batches",
    metadata,
    sa.Column("seq", sa.Integer, primary_key=True, autoincrement=True),
    sa.Column("id", sa.String(64), nullable=False, unique=True),
    sa.Column("owner", sa.String(128), nullable=False),
    # The owner's cache salt (hex), stored because the key itself is not, and may be withdrawn.
    sa.Column("salt", sa.String(64), nullable=False),
    sa.Column("endpoint", sa.String(64), nullable=False),
    # No foreign key: the file may be unknown at creation (the batch then fails) and deleted after the end.
    sa.Column("input_file_id", sa.String(64), nullable=False),
    sa.Column("completion_window", sa.String(32), nullable=False),
    sa.Column("output_expires_after_s", sa.BigInteger),
    sa.Column("metadata", sa.JSON),
    # Name of the model in the lines; known at creation if the file's record has it.
    sa.Column("model", sa.String(255)),
    # Fingerprint of the only model and tokenizer that may answer the batch. Set by the first server that serves the
    # model, which may be the one that creates the batch.
    sa.Column("model_fingerprint", sa.String(255)),
    sa.Column("status", sa.String(16), nullable=False),
    # Terminal status that has been decided and not reached yet; decides races for good.
    sa.Column("outcome", sa.String(16)),
    # Ids of the result files, chosen anew whenever their contents change (``file_rows.result_names``). So finalizing
    # twice gives the same files. Shown only at the end.
    sa.Column("planned_output_file_id", sa.String(64), nullable=False),
    sa.Column("planned_error_file_id", sa.String(64), nullable=False),
    sa.Column("output_file_id", sa.String(64)),
    sa.Column("error_file_id", sa.String(64)),
    sa.Column("errors", sa.JSON),
    sa.Column("created_at", sa.BigInteger, nullable=False),
    sa.Column("in_progress_at", sa.BigInteger),
    sa.Column("expires_at", sa.BigInteger, nullable=False),
    # When a quote that the client accepted promises the end; the scheduler's deadline. Null without a promise.
    sa.Column("due_at", sa.BigInteger),
    sa.Column("finalizing_at", sa.BigInteger),
    sa.Column("completed_at", sa.BigInteger),
    sa.Column("failed_at", sa.BigInteger),
    sa.Column("expired_at", sa.BigInteger),
    sa.Column("cancelling_at", sa.BigInteger),
    sa.Column("cancelled_at", sa.BigInteger),
    # Changed by the transaction that ends a line, so they never exceed the durable results.
    sa.Column("num_total", sa.Integer, nullable=False, server_default="0"),
    sa.Column("num_completed", sa.Integer, nullable=False, server_default="0"),
    sa.Column("num_failed", sa.Integer, nullable=False, server_default="0"),
    sa.Column("input_tokens", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("cached_tokens", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("output_tokens", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("reasoning_tokens", sa.BigInteger, nullable=False, server_default="0"),
    # Key of the plan's files on shared storage, without their suffixes.
    sa.Column("plan_blob", sa.String(255)),
    # Lease on the batch itself (to check its file and write its results), as for ``batch_chunks``.
    sa.Column("lease_epoch", sa.Integer, nullable=False, server_default="0"),
    sa.Column("leased_until_ms", sa.BigInteger, nullable=False, server_default="0"),
    sa.Index("batches_by_owner", "owner", "seq"),
    sa.Index("batches_by_status", "status"),
    sa.Index("batches_by_input", "input_file_id"),
    sa.Index("batches_by_output_file_id", "output_file_id"),
    sa.Index("batches_by_error_file_id", "error_file_id"),
    sqlite_autoincrement=True,
)

batch_lines = sa.Table(
    "batch_lines",
    metadata,
    sa.Column("batch_id", sa.String(64), sa.ForeignKey("batches.id", ondelete="CASCADE"), primary_key=True),
    # Physical line of the input file, from 1.
    sa.Column("line_no", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("custom_id", sa.String(512), nullable=False),
    # Where the line stands in the input file. Its body is read again only where its reply record is unusable.
    sa.Column("byte_offset", sa.BigInteger, nullable=False),
    sa.Column("num_bytes", sa.BigInteger, nullable=False),
    # Lines of the job's token file, one for each choice; none if the body was refused.
    sa.Column("first_row", sa.Integer, nullable=False),
    sa.Column("num_rows", sa.Integer, nullable=False),
    sa.Column("state", sa.String(16), nullable=False),
    # Chunk of ``batch_chunks``; null for lines that no server may lease.
    sa.Column("chunk_no", sa.Integer),
    # Engine deaths while the line ran.
    sa.Column("attempts", sa.Integer, nullable=False, server_default="0"),
    sa.Column("status_code", sa.Integer),
    sa.Column("request_id", sa.String(64)),
    # JSON texts, copied byte for byte to the output file. Text columns are not reformatted by any database.
    sa.Column("result", sa.Text),
    sa.Column("error", sa.Text),
    # Checksum of state, status code, request id and result, because the database does not notice a changed byte.
    sa.Column("checksum", sa.BigInteger),
    sa.Column("input_tokens", sa.Integer, nullable=False, server_default="0"),
    sa.Column("cached_tokens", sa.Integer, nullable=False, server_default="0"),
    sa.Column("output_tokens", sa.Integer, nullable=False, server_default="0"),
    sa.Column("reasoning_tokens", sa.Integer, nullable=False, server_default="0"),
    sa.UniqueConstraint("batch_id", "custom_id", name="batch_lines_custom_id"),
    # For leases of chunks, which would otherwise read all lines of the batch.
    sa.Index(
        "batch_lines_by_chunk",
        "batch_id",
        "chunk_no",
        sqlite_where=sa.text("chunk_no IS NOT NULL"),
        postgresql_where=sa.text("chunk_no IS NOT NULL"),
    ),
)

# Groups of lines that servers lease together; deleted with its leases when all lines have ended.
batch_chunks = sa.Table(
    "batch_chunks",
    metadata,
    sa.Column("batch_id", sa.String(64), sa.ForeignKey("batches.id", ondelete="CASCADE"), primary_key=True),
    sa.Column("chunk_no", sa.Integer, primary_key=True, autoincrement=False),
    # See ``neaptide/cluster/lease_order.py``.
    sa.Column("deadline_class", sa.BigInteger, nullable=False),
    sa.Column("density", sa.Double, nullable=False),
    # Expected time on an idle device, from when the batch was cut; 0 if unknown.
    sa.Column("compute_s", sa.Double, nullable=False, server_default="0"),
    sa.Column("memory_s", sa.Double, nullable=False, server_default="0"),
    # Context that a server needs to run all of it; 0 in records of earlier versions.
    sa.Column("needs_tokens", sa.Integer, nullable=False, server_default="0"),
    # Grows with every lease; results under an older one are refused.
    sa.Column("epoch", sa.Integer, nullable=False, server_default="0"),
    sa.Column("leased_until_ms", sa.BigInteger, nullable=False, server_default="0"),
    # The server of the last lease.
    sa.Column("holder", sa.String(64)),
    sa.Index("batch_chunks_in_order", "deadline_class", "density"),
)

# Servers that have recently used the database; see ``server_rows.py``.
servers = sa.Table(
    "servers",
    metadata,
    sa.Column("name", sa.String(64), primary_key=True),
    sa.Column("fingerprint", sa.String(255), nullable=False),
    # Names of the model, as a list.
    sa.Column("models", sa.JSON, nullable=False),
    sa.Column("max_model_len", sa.Integer, nullable=False),
    sa.Column("follows_grammars", sa.Boolean, nullable=False),
    sa.Column("max_masked_ends", sa.Integer),
    # By the database's clock. A server that is no longer present may return.
    sa.Column("there_until_ms", sa.BigInteger, nullable=False),
)

# Facts about the database as a whole; see ``neaptide/cluster/storage/form.py``.
facts = sa.Table(
    "facts",
    metadata,
    sa.Column("name", sa.String(64), primary_key=True),
    sa.Column("value", sa.String(255), nullable=False),
)

# One record per server; see ``databases/commit_tokens.py``.
commit_tokens = sa.Table(
    "commit_tokens",
    metadata,
    sa.Column("server", sa.String(64), primary_key=True),
    # Token of the last transaction that this server has committed.
    sa.Column("token", sa.String(64), nullable=False),
    sa.Column("changed_at", sa.BigInteger, nullable=False),
)

idempotency_keys = sa.Table(
    "idempotency_keys",
    metadata,
    sa.Column("owner", sa.String(128), primary_key=True),
    sa.Column("kind", sa.String(16), primary_key=True),
    sa.Column("key", sa.String(255), primary_key=True),
    sa.Column("body_hash", sa.String(64), nullable=False),
    sa.Column("object_id", sa.String(64), nullable=False),
    sa.Column("created_at", sa.BigInteger, nullable=False),
)

# What each API key has used; see ``usage_rows.py``.
key_usage = sa.Table(
    "key_usage",
    metadata,
    sa.Column("tenant", sa.String(128), primary_key=True),
    # JSON of ``limits/usage.py``.
    sa.Column("counts", sa.Text, nullable=False),
    sa.Column("changed_at_ms", sa.BigInteger, nullable=False),
)

# Ten-minute aggregates of the traffic of each server; see ``period_rows.py``.
traffic_periods = sa.Table(
    "traffic_periods",
    metadata,
    sa.Column("server", sa.String(64), primary_key=True),
    sa.Column("start_s", sa.BigInteger, primary_key=True, autoincrement=False),
    # JSON of ``quotes/periods.py``.
    sa.Column("counts", sa.Text, nullable=False),
)

# Costs of unfinished batches, by start of the server; see ``cost_rows.py``.
batch_costs = sa.Table(
    "batch_costs",
    metadata,
    sa.Column("batch_id", sa.String(64), sa.ForeignKey("batches.id", ondelete="CASCADE"), primary_key=True),
    sa.Column("server_run", sa.String(16), primary_key=True),
    # JSON of ``receipts/sums.py``.
    sa.Column("sums", sa.Text, nullable=False),
)

batch_receipts = sa.Table(
    "batch_receipts",
    metadata,
    sa.Column("batch_id", sa.String(64), sa.ForeignKey("batches.id", ondelete="CASCADE"), primary_key=True),
    # JSON without the hash.
    sa.Column("receipt", sa.Text, nullable=False),
)

# Device time and computed tokens of each key, UTC day and kind of work, by start of a server.
key_costs = sa.Table(
    "key_costs",
    metadata,
    sa.Column("server_run", sa.String(16), primary_key=True),
    sa.Column("day", sa.Integer, primary_key=True, autoincrement=False),
    # Name of the key, or its fingerprint; empty without keys.
    sa.Column("key", sa.String(64), primary_key=True),
    sa.Column("work", sa.String(16), primary_key=True),
    sa.Column("device_s", sa.Double, nullable=False),
    sa.Column("prefill_tokens", sa.BigInteger, nullable=False),
    sa.Column("decode_tokens", sa.BigInteger, nullable=False),
)
