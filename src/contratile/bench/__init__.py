"""What `contratile bench` runs: contestants, a harness that is fair to them, recorded rows and their plots."""
