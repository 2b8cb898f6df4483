"""`python -m finback` is the command `finback`."""

from __future__ import annotations

import sys

from finback.cli import main

if __name__ == "__main__":
    sys.exit(main())
