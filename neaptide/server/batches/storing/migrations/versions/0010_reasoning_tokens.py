"""Tokens of reasoning in the answers; answers that ended before count none."""

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("batches", sa.Column("reasoning_tokens", sa.BigInteger, nullable=False, server_default="0"))
    op.add_column("batch_lines", sa.Column("reasoning_tokens", sa.Integer, nullable=False, server_default="0"))
