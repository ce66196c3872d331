"""Gradient caching: train encoders on huge batches in the memory of one chunk."""

from contratile.grad_cache.cache import GradCache as GradCache
from contratile.grad_cache.lengths import ByLength as ByLength
from contratile.grad_cache.rows import Rows as Rows
