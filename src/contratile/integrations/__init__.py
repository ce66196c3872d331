"""The losses under the names and calls of other packages, none of which is imported: users change an import."""
