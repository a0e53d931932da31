"""Composition root of the child that simulates for the API process what was recorded of its traffic.

``python -m neaptide.launch.simulating PARENT_PID`` reads tasks from its standard input and answers on its standard
output. It has what no other process wants of the processor, bounded memory, and dies with its parent.
"""

import signal
import sys

from neaptide.engine.process.parent import die_with_parent
from neaptide.server.children.child import bound_memory, pipes, stand_back

MEMORY_BYTES = 2 << 30


def main(parent_pid: int) -> None:
    """Answers one task after another until its input ends."""
    die_with_parent(parent_pid)
    stand_back(19, is_idle=True)
    # Behind that: to import it takes a third of a second of a processor.
    from neaptide.launch.simulation_answers import answer_tasks

    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    source, sink = pipes()
    bound_memory(MEMORY_BYTES)
    answer_tasks(source, sink)


if __name__ == "__main__":
    main(int(sys.argv[1]))
