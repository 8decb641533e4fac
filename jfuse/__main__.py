"""`python -m jfuse` is the `jfuse` command."""

import sys

from jfuse.cli import main

if __name__ == "__main__":
    sys.exit(main())
