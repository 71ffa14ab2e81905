"""Seeded faults: the conformance kit must catch each and name the right site. In `tests/`: `python -m mutants`."""
