"""A child of the server that never comes to the end of its imports, and does not notice the end of its input."""

import signal

print("here", flush=True)
signal.pause()
