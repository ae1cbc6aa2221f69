"""`python -m piebald` is `piebald`."""

import sys

from piebald.cli import main

if __name__ == "__main__":
    sys.exit(main())
