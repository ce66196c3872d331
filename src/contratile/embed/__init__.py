"""Features of any data, on disk; hard negatives of a run's data."""
