"""The command ``neaptide``, and ``python -m neaptide``. All other imports stand where a Ctrl-C is heard."""

import sys
from collections.abc import Sequence

INTERRUPTED = 130
"""The exit status that shells give to a command ended by Ctrl-C."""


def main(argv: Sequence[str] | None = None) -> int:
    try:
        from neaptide import cli

        return cli.main(sys.argv[1:] if argv is None else argv)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
