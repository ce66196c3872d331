"""Drop-in replacements for the losses of other packages: change an import. The packages are not imported."""
