"""Encoders by name: towers, their backbones, and cached outputs of locked ones. Needs the extra `train`."""
