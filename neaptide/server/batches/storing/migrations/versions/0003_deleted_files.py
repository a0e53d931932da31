"""Deleted files, kept until their bytes and results are removed, and a while longer as places in lists.

Result files that were deleted before left their results; they are added here, so that those are removed.
"""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "deleted_files",
        sa.Column("id", sa.String(64), primary_key=True),
        sa.Column("owner", sa.String(128), nullable=False),
        sa.Column("seq", sa.Integer, nullable=False),
        sa.Column("deleted_at", sa.BigInteger, nullable=False),
        sa.Column("is_swept", sa.Boolean, nullable=False),
    )
    batches = sa.table("batches", *(sa.column(name) for name in ("owner", "output_file_id", "error_file_id")))
    known = sa.select(sa.table("files", sa.column("id")).c.id)
    deleted = sa.table("deleted_files", *map(sa.column, ("id", "owner", "seq", "deleted_at", "is_swept")))
    for name in ("output_file_id", "error_file_id"):
        op.create_index(f"batches_by_{name}", "batches", [name])
        file_id = batches.c[name]
        gone = sa.select(file_id, batches.c.owner, sa.literal(0), sa.literal(0), sa.false())
        gone = gone.where(file_id.is_not(None), file_id.not_in(known))
        op.execute(deleted.insert().from_select(["id", "owner", "seq", "deleted_at", "is_swept"], gone))
