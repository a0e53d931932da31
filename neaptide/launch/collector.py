"""Python's garbage collector in a process that answers clients."""

import gc


def pass_over_start_up() -> None:
    """What start-up has allocated never becomes garbage. Walked with the rest, some 140,000 objects of imported
    packages keep every client waiting for a tenth of a second, now and then."""
    gc.collect()
    gc.freeze()
