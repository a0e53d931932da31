"""What-if questions about the recorded traffic, one at a time, answered by a child process."""

from pathlib import Path

import msgspec

from neaptide.server.counterfactual.frames import WhatIfAnswer, WhatIfTask, encoder, what_if_decoder
from neaptide.server.counterfactual.ring import TrafficRing
from neaptide.server.subprocesses.on_call import Child, ChildDiedError

IDLE_S = 60.0
ANSWER_S = 300.0
"""Longest wait for an answer; at idle priority the child may have to wait for a core."""


class WhatIfBusyError(Exception):
    """Another question is being answered."""


class TooMuchError(Exception):
    """The simulation exceeded its limit of time or memory."""


class WhatIfQueries:
    """Answers what-if questions. Event loop only.

    Args:
        module: program of the child process.
        temporary: parent of the child's temporary files.
    """

    def __init__(self, ring: TrafficRing, module: str, temporary: Path | None = None) -> None:
        self._ring = ring
        self._child = Child(module, None, IDLE_S, temporary)
        self._is_busy = False

    @property
    def pid(self) -> int | None:
        """Process id of the child; None without one."""
        return self._child.pid

    async def ask(self, task: WhatIfTask, since_s: float) -> WhatIfAnswer:
        """Answers a question about the traffic recorded since ``since_s``; adds the recorded pieces to the task.

        Raises:
            WhatIfBusyError, TooMuchError, NoAnswerError, EngineUnavailableError: there is no answer.
        """
        if self._is_busy:
            raise WhatIfBusyError
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
