"""Servers with their models and abilities, and the needs of batches, files and chunks."""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("files", sa.Column("model", sa.String(255)))
    op.add_column("batch_chunks", sa.Column("needs_tokens", sa.Integer, nullable=False, server_default="0"))
    op.create_table(
        "servers",
        sa.Column("name", sa.String(64), primary_key=True),
        sa.Column("fingerprint", sa.String(255), nullable=False),
        sa.Column("models", sa.JSON, nullable=False),
        sa.Column("max_model_len", sa.Integer, nullable=False),
        sa.Column("follows_grammars", sa.Boolean, nullable=False),
        sa.Column("max_masked_ends", sa.Integer),
        sa.Column("there_until_ms", sa.BigInteger, nullable=False),
    )
