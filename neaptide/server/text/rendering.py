"""Renders a model's chat templates, in this process or in one that is killed if a template takes too much."""

import contextlib
import json
import logging
import subprocess
import threading
import weakref
from collections.abc import Mapping
from dataclasses import asdict
from typing import BinaryIO, Protocol, cast

from neaptide.server.http.errors import ContextLengthError, InvalidRequestError, UnavailableError
from neaptide.server.subprocesses.frames import read_frame, write_frame
from neaptide.server.subprocesses.start import child_command, child_environment
from neaptide.server.text.chat_template import ChatTemplate, TemplateInput

logger = logging.getLogger(__name__)

CPU_S, LEAST_CPU_S = 2.0, 0.25
"""Longest processor time of a conversation. Real templates take milliseconds. It is halved with each process that had
to be killed: a template that does it once does it again."""
WALL_S = 20.0
"""Longest wait for an answer, in case the machine is so busy that the child hardly runs."""
MEMORY_BYTES = 512 << 20


class Renderer(Protocol):
    def render(self, template: str, given: TemplateInput) -> str:
        """The prompt text by the template of this name.

        Raises:
            InvalidRequestError: the template refuses the conversation, or takes too much time or memory for it.
            ContextLengthError: the text is longer than the conversation's limit.
        """
        ...

    def close(self) -> None: ...


class OwnRenderer:
    """Renders in this process, for templates of our own and for processes that may be killed.

    Raises:
        ValueError: a source is not a template.
    """

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        self._templates = {name: ChatTemplate(source, special_tokens) for name, source in sources.items()}

    def render(self, template: str, given: TemplateInput) -> str:
        """As in ``Renderer``."""
        return self._templates[template].render(given)

    def close(self) -> None:
        """Does nothing."""


class ChildRenderer:
    """Renders one conversation at a time in a child process, which is started on demand. Thread-safe; blocks.

    Raises:
        ValueError: a source is not a template.
    """

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        hello = {"sources": dict(sources), "special_tokens": dict(special_tokens), "cpu_s": CPU_S}
        self._hello = json.dumps(hello).encode()
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._end: weakref.finalize[[subprocess.Popen[bytes]], ChildRenderer] | None = None
        self._cpu_s = CPU_S
        if sources:
            with self._lock:
                self._running()

    @property
    def pid(self) -> int | None:
        """Process id of the child; None without one."""
        return None if self._child is None else self._child.pid

    def render(self, template: str, given: TemplateInput) -> str:
        """As in ``Renderer``.

        Raises:
            UnavailableError: the machine is too busy.
        """
        if not self._lock.acquire(timeout=WALL_S):
            raise _too_busy()
        try:
            frame = json.dumps({**asdict(given), "template": template, "cpu_s": self._cpu_s}).encode()
            found = self._ask(self._running(), frame)
            if found is None:
                self._cpu_s = max(LEAST_CPU_S, self._cpu_s / 2)
                logger.warning("a chat template took too much time or memory for a conversation")
                raise InvalidRequestError(
                    "The model's chat template takes too much time or memory for this conversation.", param="messages"
                )
        except OSError as error:
            logger.error("the process that renders chat templates could not be started: %s", error)
            raise _too_busy() from error
        finally:
            self._lock.release()
        answer = json.loads(found)
        if "too_long" in answer:
            raise ContextLengthError(answer["too_long"], param=answer["param"])
        if "refused" in answer:
            raise InvalidRequestError(answer["refused"], param=answer["param"], code=answer["code"])
        return str(answer["text"])

    def close(self) -> None:
        """Kills the child process."""
        if self._end is not None:
            self._end()  # Not under the lock: it ends a conversation that is being rendered, too.

    def _running(self) -> "subprocess.Popen[bytes]":
        """The child, started if needed.

        Raises:
            OSError: it cannot be started.
            ValueError: a source is not a template.
        """
        if self._child is not None and self._child.poll() is None:
            return self._child
        child = self._child = subprocess.Popen(  # noqa: S603
            child_command("neaptide.server.text.render_child", str(MEMORY_BYTES)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # It may quote the caller.
            env=child_environment(),
        )
        self._end = weakref.finalize(self, _end, child)
        complaint = self._ask(child, self._hello)
        if complaint is None:
            raise ValueError("the model's chat template cannot be used: it takes too much time or memory")
        if complaint:
            raise ValueError(complaint.decode())
        return child

    def _ask(self, child: "subprocess.Popen[bytes]", frame: bytes) -> bytes | None:
        """The child's answer; None if it was killed, so that it is gone."""
        watch = threading.Timer(WALL_S, child.kill)
        watch.start()
        answer = None
        try:
            write_frame(cast(BinaryIO, child.stdin), frame)
            answer = read_frame(cast(BinaryIO, child.stdout))
        except (OSError, ValueError):
            pass
        finally:
            watch.cancel()
        if answer is None:
            self.close()
        return answer


def _too_busy() -> UnavailableError:
    return UnavailableError("The conversation could not be rendered in time; try again.", code="overloaded")


def _end(child: "subprocess.Popen[bytes]") -> None:
    """Removes the process and its descriptors."""
    child.kill()
    child.wait()
    for pipe in (child.stdin, child.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()
