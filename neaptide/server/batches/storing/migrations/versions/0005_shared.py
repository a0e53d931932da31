"""Servers that share a database: keys of bytes on shared storage, leases of batches, holders of chunks."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("files", sa.Column("blob", sa.String(255)))
    op.add_column("deleted_files", sa.Column("blob", sa.String(255)))
    op.add_column("batches", sa.Column("plan_blob", sa.String(255)))
    op.add_column("batches", sa.Column("lease_epoch", sa.Integer, nullable=False, server_default="0"))
    op.add_column("batches", sa.Column("leased_until_ms", sa.BigInteger, nullable=False, server_default="0"))
    op.add_column("batch_chunks", sa.Column("holder", sa.String(64)))
    op.create_table(
        "facts",
        sa.Column("name", sa.String(64), primary_key=True),
        sa.Column("value", sa.String(255), nullable=False),
    )
