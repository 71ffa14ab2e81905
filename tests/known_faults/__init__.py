"""Public faults of peers (rows B1, B2, ... of a list of known faults), and hazards read in their code (I1, I2, ...).

Each has a test that fails without its cure.
"""
