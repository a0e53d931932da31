"""Files, batches, batch lines, idempotency keys."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def _create_files() -> None:
    op.create_table(
        "files",
        sa.Column("seq", sa.Integer, primary_key=True, autoincrement=True),
        sa.Column("id", sa.String(64), nullable=False, unique=True),
        sa.Column("owner", sa.String(128), nullable=False),
        sa.Column("filename", sa.String(255), nullable=False),
        sa.Column("purpose", sa.String(32), nullable=False),
        sa.Column("num_bytes", sa.BigInteger, nullable=False),
        sa.Column("sha256", sa.String(64), nullable=False),
        sa.Column("created_at", sa.BigInteger, nullable=False),
        sa.Column("expires_at", sa.BigInteger),
        sqlite_autoincrement=True,
    )
    op.create_index("files_by_owner", "files", ["owner", "seq"])


def _create_batches() -> None:
    op.create_table(
        "batches",
        sa.Column("seq", sa.Integer, primary_key=True, autoincrement=True),
        sa.Column("id", sa.String(64), nullable=False, unique=True),
        sa.Column("owner", sa.String(128), nullable=False),
        sa.Column("salt", sa.String(64), nullable=False),
        sa.Column("endpoint", sa.String(64), nullable=False),
        sa.Column("input_file_id", sa.String(64), nullable=False),
        sa.Column("completion_window", sa.String(32), nullable=False),
        sa.Column("output_expires_after_s", sa.BigInteger),
        sa.Column("metadata", sa.JSON),
        sa.Column("model", sa.String(255)),
        sa.Column("model_fingerprint", sa.String(255)),
        sa.Column("status", sa.String(16), nullable=False),
        sa.Column("outcome", sa.String(16)),
        sa.Column("planned_output_file_id", sa.String(64), nullable=False),
        sa.Column("planned_error_file_id", sa.String(64), nullable=False),
        sa.Column("output_file_id", sa.String(64)),
        sa.Column("error_file_id", sa.String(64)),
        sa.Column("errors", sa.JSON),
        sa.Column("created_at", sa.BigInteger, nullable=False),
        sa.Column("in_progress_at", sa.BigInteger),
        sa.Column("expires_at", sa.BigInteger, nullable=False),
        sa.Column("finalizing_at", sa.BigInteger),
        sa.Column("completed_at", sa.BigInteger),
        sa.Column("failed_at", sa.BigInteger),
        sa.Column("expired_at", sa.BigInteger),
        sa.Column("cancelling_at", sa.BigInteger),
        sa.Column("cancelled_at", sa.BigInteger),
        sa.Column("num_total", sa.Integer, nullable=False, server_default="0"),
        sa.Column("num_completed", sa.Integer, nullable=False, server_default="0"),
        sa.Column("num_failed", sa.Integer, nullable=False, server_default="0"),
        sa.Column("input_tokens", sa.BigInteger, nullable=False, server_default="0"),
        sa.Column("cached_tokens", sa.BigInteger, nullable=False, server_default="0"),
        sa.Column("output_tokens", sa.BigInteger, nullable=False, server_default="0"),
        sqlite_autoincrement=True,
    )
    op.create_index("batches_by_owner", "batches", ["owner", "seq"])
    op.create_index("batches_by_status", "batches", ["status"])
    op.create_index("batches_by_input", "batches", ["input_file_id"])


def _create_batch_lines() -> None:
    op.create_table(
        "batch_lines",
        sa.Column("batch_id", sa.String(64), sa.ForeignKey("batches.id", ondelete="CASCADE"), primary_key=True),
        sa.Column("line_no", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("custom_id", sa.String(512), nullable=False),
        sa.Column("byte_offset", sa.BigInteger, nullable=False),
        sa.Column("num_bytes", sa.BigInteger, nullable=False),
        sa.Column("first_row", sa.Integer, nullable=False),
        sa.Column("num_rows", sa.Integer, nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("attempts", sa.Integer, nullable=False, server_default="0"),
        sa.Column("status_code", sa.Integer),
        sa.Column("request_id", sa.String(64)),
        sa.Column("result", sa.Text),
        sa.Column("error", sa.Text),
        sa.Column("input_tokens", sa.Integer, nullable=False, server_default="0"),
        sa.Column("cached_tokens", sa.Integer, nullable=False, server_default="0"),
        sa.Column("output_tokens", sa.Integer, nullable=False, server_default="0"),
        sa.UniqueConstraint("batch_id", "custom_id", name="batch_lines_custom_id"),
    )


def _create_idempotency_keys() -> None:
    op.create_table(
        "idempotency_keys",
        sa.Column("owner", sa.String(128), primary_key=True),
        sa.Column("kind", sa.String(16), primary_key=True),
        sa.Column("key", sa.String(255), primary_key=True),
        sa.Column("body_hash", sa.String(64), nullable=False),
        sa.Column("object_id", sa.String(64), nullable=False),
        sa.Column("created_at", sa.BigInteger, nullable=False),
    )


def upgrade() -> None:
    _create_files()
    _create_batches()
    _create_batch_lines()
    _create_idempotency_keys()


def downgrade() -> None:
    for table in ("idempotency_keys", "batch_lines", "batches", "files"):
        op.drop_table(table)
