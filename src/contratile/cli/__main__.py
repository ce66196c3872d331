"""`python -m contratile.cli` is the command `contratile`."""

import sys

from contratile.cli import main

sys.exit(main())
