"""Main module of a replica: a server on a listening socket that its parent made.

``python -m neaptide.cluster.launch.replica SOCKET`` reads its settings from standard input, because they may contain
keys. A command line would show those to every user of the machine.
"""

import socket
import sys

import msgspec

from neaptide.launch.serve import LaunchError, serve
from neaptide.server.settings import Settings


def main(listener_fd: int) -> int:
    """Serves until a stop signal; returns the exit status."""
    settings = msgspec.json.decode(sys.stdin.buffer.read(), type=Settings)
    listener = socket.socket(fileno=listener_fd)
    try:
        return serve(settings, listener)
    except LaunchError as error:
        print(f"neaptide cluster: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
