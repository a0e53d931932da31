"""Composition root of the subprocess that simulates recorded traffic for the API process.

``python -m neaptide.launch.simulating`` reads tasks from its standard input and answers on its standard output. It runs
at idle priority, with bounded memory.
"""

import signal

from neaptide.server.subprocesses.child import bound_memory, pipes, set_idle_priority

MEMORY_BYTES = 2 << 30


def main() -> None:
    """Answers tasks one by one until its input ends."""
    set_idle_priority(19, is_idle=True)
    # After lowering the priority: this import takes a third of a second of processor time.
    from neaptide.launch.simulation_answers import answer_tasks

    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    source, sink = pipes()
    bound_memory(MEMORY_BYTES)
    answer_tasks(source, sink)


if __name__ == "__main__":
    main()
