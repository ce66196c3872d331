"""The primitive: statistics of scores tile by tile, and their gradient."""
