"""Huge batches through real encoders, in the memory of one chunk."""

from contratile.grad_cache.cache import GradCache as GradCache
