"""Starts and ends child processes of the server."""

import asyncio
import contextlib
import logging
import os
import re
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Mapping, Sequence

logger = logging.getLogger(__name__)

KILL_TIMEOUT_S = 5.0
_SECRETS = re.compile(r"(?i)NEAPTIDE_.*|(.*_)?(TOKEN|SECRET|KEY|CREDENTIALS|PASSWORD|PGPASSWORD)(_.*)?")
"""Variables that no child needs: the server's own settings, which may be keys and passwords, and what looks like a
secret of others."""


def child_command(module: str, *arguments: str, executable: str | None = None) -> list[str]:
    """Command that runs a module of ours; ``-P`` keeps modules of the working directory out."""
    return [executable or sys.executable, "-P", "-m", module, *arguments]


def without_secrets(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """An environment without keys, tokens and passwords: a child runs grammars, templates and models of others."""
    return {name: value for name, value in environment.items() if not _SECRETS.fullmatch(name)}


def child_environment(environment: Mapping[str, str] = os.environ) -> Mapping[str, str]:
    """Environment of a child process: it uses one core, because the engine needs the others."""
    threads = ("RAYON_NUM_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    return {**without_secrets(environment), "TOKENIZERS_PARALLELISM": "false", **dict.fromkeys(threads, "1")}


async def start_child(
    module: str,
    *arguments: str,
    executable: str | None = None,
    environment: Mapping[str, str] | None = None,
    talks: bool = True,
    pass_fds: Sequence[int] = (),
) -> Process:
    """Runs a module of ours, which dies with this process.

    Args:
        talks: it exchanges frames over its standard input and output.
    """
    return await asyncio.create_subprocess_exec(
        *child_command("neaptide.engine.process.tied", str(os.getpid()), module, *arguments, executable=executable),
        stdin=PIPE if talks else DEVNULL,
        stdout=PIPE if talks else None,
        env=environment or child_environment(),
        pass_fds=pass_fds,
    )


async def end_child(process: Process) -> None:
    """Kills the process if it still runs, and waits for its end."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
    try:
        async with asyncio.timeout(KILL_TIMEOUT_S):
            await process.wait()
    except TimeoutError:
        logger.error("the process %d did not end after SIGKILL; the server goes on without waiting for it", process.pid)
