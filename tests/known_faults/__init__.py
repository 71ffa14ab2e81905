"""Public faults of peers (the rows B1, B2, ... of the list of known faults): for each a test that fails without its cure."""
