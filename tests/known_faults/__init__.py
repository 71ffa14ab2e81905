"""Public faults of peers (rows B1, B2, ... of a list of known faults): each has a test that fails without its cure."""
