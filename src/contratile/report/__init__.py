"""What a run shows: its log, curves, contact sheets, report and gallery. Needs the extra `train`."""
