"""Checks of the machine at hand, shown by `contratile doctor`."""
