"""`python -m piebald.cli` is `piebald`."""

import sys

from piebald.cli import main

sys.exit(main())
