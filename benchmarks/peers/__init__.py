"""Other engines to compare with, each in its own environment (``install.sh``)."""
