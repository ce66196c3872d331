"""Hard negatives by exact search over all keys, in memory that does not grow with their number."""

from contratile.mining.hard_negatives import HardNegatives as HardNegatives
from contratile.mining.hard_negatives import mine_hard_negatives as mine_hard_negatives
