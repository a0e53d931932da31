"""Composition root of the child that simulates for the API process what was recorded of its traffic.

``python -m neaptide.launch.simulating`` reads tasks from its standard input and answers on its standard
output. It has what no other process wants of the processor, and bounded memory.
"""

import signal

from neaptide.server.children.child import bound_memory, pipes, stand_back

MEMORY_BYTES = 2 << 30


def main() -> None:
    """Answers one task after another until its input ends."""
    stand_back(19, is_idle=True)
    # Behind that: to import it takes a third of a second of a processor.
    from neaptide.launch.simulation_answers import answer_tasks

    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    source, sink = pipes()
    bound_memory(MEMORY_BYTES)
    answer_tasks(source, sink)


if __name__ == "__main__":
    main()
