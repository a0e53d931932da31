"""Optional parts of the installation, and what to install where one is missing.

``pip install neaptide`` brings the simulator, the planner, the load generator and the client of batches. Everything
else comes with the extras of ``pyproject.toml``.
"""

from importlib.util import find_spec

EXTRA_OF = {
    "uvicorn": "gateway",
    "alembic": "server",
    "fastapi": "server",
    "llguidance": "server",
    "python_multipart": "server",
    "sqlalchemy": "server",
    "zmq": "server",
    "safetensors": "torch",
    "torch": "torch",
    "psycopg": "postgres",
    "s3fs": "s3",
    "ray": "cluster",
    "matplotlib": "plots",
}
"""The extra that brings a package, by the package's import name."""


class MissingPartError(ValueError):
    """A package of an extra is not installed. The message is one line that says what to install."""


def check_part(package: str) -> None:
    """Looks for a package without importing it.

    Raises:
        MissingPartError: the package, which an extra brings, is not installed.
    """
    if find_spec(package) is None:
        raise missing_part(package)


def missing_part(package: str) -> MissingPartError:
    """The error for an absent package of an extra."""
    return MissingPartError(f"{package} is not installed: pip install 'neaptide[{EXTRA_OF[package]}]'")
