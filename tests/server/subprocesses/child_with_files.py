"""A child of the server that has a temporary file open when it is killed."""

import tempfile

from neaptide.server.subprocesses.child import pipes
from neaptide.server.subprocesses.frames import read_frame, write_frame

if __name__ == "__main__":
    source, sink = pipes()
    with tempfile.NamedTemporaryFile() as file:
        write_frame(sink, file.name.encode())
        read_frame(source)
