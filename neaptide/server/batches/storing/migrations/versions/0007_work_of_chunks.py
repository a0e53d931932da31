"""Device time of each chunk, for autoscaling."""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    for name in ("compute_s", "memory_s"):
        op.add_column("batch_chunks", sa.Column(name, sa.Double, nullable=False, server_default="0"))
