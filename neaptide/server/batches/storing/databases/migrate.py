"""Migration of the tables by ``migrations/``, the same on every database."""

import logging
from importlib import resources

import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory

from neaptide.server.batches.storing.data_dir import WAY_BACK, StoreError

logger = logging.getLogger(__name__)


def migrate(conn: sa.Connection) -> None:
    """Migrates the tables to the newest schema, in one transaction.

    Raises:
        StoreError: the schema is newer than this version.
    """
    with resources.as_file(resources.files("neaptide.server.batches.storing") / "migrations") as scripts:
        config = Config()
        # The option is a format string.
        config.set_main_option("script_location", str(scripts).replace("%", "%%"))
        config.set_main_option("path_separator", "os")
        config.attributes["connection"] = conn
        head = ScriptDirectory.from_config(config).get_current_head()
        current = MigrationContext.configure(conn).get_current_revision()
        conn.rollback()
        if current == head:
            return
        known = {script.revision for script in ScriptDirectory.from_config(config).walk_revisions()}
        if current is not None and current not in known:
            raise StoreError(f"the database was written by a newer neaptide (schema {current}); {WAY_BACK}")
        logger.info("migrating the database from schema %s to %s", current or "blank", head)
        command.upgrade(config, "head")
        conn.commit()
