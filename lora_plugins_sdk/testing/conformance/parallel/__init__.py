"""Level 2: every layout must reproduce the run of one process, rank by rank."""
