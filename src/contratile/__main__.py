"""`python -m contratile` is the command `contratile`; torchrun and accelerate start it so."""

import sys

from contratile.cli import main

sys.exit(main())
