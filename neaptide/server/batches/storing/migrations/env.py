"""Alembic environment; uses the connection of the store and opens none."""

from alembic import context

from neaptide.server.batches.storing.tables import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    # SQLite cannot alter most things in place; later migrations copy the table instead.
    render_as_batch=True,
    transactional_ddl=True,
)
with context.begin_transaction():
    context.run_migrations()
