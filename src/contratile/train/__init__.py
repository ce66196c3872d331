"""Training two towers with a contrastive loss: what `contratile train` runs. Needs the extra `train`."""
