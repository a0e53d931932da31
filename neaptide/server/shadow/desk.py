"""The what-if desk: one question at a time about the recorded traffic, answered by a child process."""

from pathlib import Path

import msgspec

from neaptide.server.children.on_call import Child, ChildDiedError
from neaptide.server.shadow.frames import WhatIfAnswer, WhatIfTask, encoder, what_if_decoder
from neaptide.server.shadow.ring import TrafficRing

IDLE_S = 60.0
ANSWER_S = 300.0
"""For an answer: at idle priority the child may wait for its turn."""


class DeskBusyError(Exception):
    """Another question is being answered."""


class TooMuchError(Exception):
    """The simulation took more time or memory than it may."""


class WhatIfDesk:
    """Event loop only.

    Args:
        module: the child's program.
        temporary: for the child's temporary files.
    """

    def __init__(self, ring: TrafficRing, module: str, temporary: Path | None = None) -> None:
        self._ring = ring
        self._child = Child(module, None, IDLE_S, temporary)
        self._is_busy = False

    @property
    def pid(self) -> int | None:
        """The child's, while there is one."""
        return self._child.pid

    async def ask(self, task: WhatIfTask, since_s: float) -> WhatIfAnswer:
        """About what was recorded from that time on; the task's pieces are put in here.

        Raises:
            DeskBusyError, TooMuchError, NoAnswerError, EngineUnavailableError
        """
        if self._is_busy:
            raise DeskBusyError
        self._is_busy = True
        try:
            pieces = await self._ring.pieces(since_s)
            await self._child.wake()
            self._child.send(encoder.encode(msgspec.structs.replace(task, pieces=pieces)))
            answer = what_if_decoder.decode(await self._child.receive(ANSWER_S))
        except (ChildDiedError, TimeoutError) as error:
            await self._child.close()
            raise TooMuchError from error
        except BaseException:
            await self._child.close()
            raise
        finally:
            self._is_busy = False
        self._child.rest()
        return answer

    async def stop(self) -> None:
        await self._child.close()
