"""`python -m contratile` is the command `contratile`; torchrun and accelerate use it."""

import sys

from contratile.cli import main

sys.exit(main())
