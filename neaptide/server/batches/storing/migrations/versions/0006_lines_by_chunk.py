"""Index of the lines of each chunk; lines that are not leased are not in it."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    where = sa.text("chunk_no IS NOT NULL")
    op.create_index(
        "batch_lines_by_chunk", "batch_lines", ["batch_id", "chunk_no"], sqlite_where=where, postgresql_where=where
    )
