"""Encoders by name: towers, their backbones, and kept outputs of locked ones. Needs the extra `train`."""
