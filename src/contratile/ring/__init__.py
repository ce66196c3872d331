"""The ranks that share a loss, and how blocks travel among them."""
