"""Runs a module of ours as a program that dies with its parent, even during its imports.

``python -P -m neaptide.engine.process.tied PARENT_PID MODULE ARGUMENT ...`` runs MODULE. Start it from a thread that
lives as long as its process: the kernel takes the end of that thread for the end of the parent.
"""

import runpy
import sys

from neaptide.engine.process.parent import die_with_parent

if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    del sys.argv[:2]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
