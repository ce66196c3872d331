"""Contratile's losses with the calls of other packages: change an import."""
