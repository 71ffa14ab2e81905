"""What runs inside the ranks of a test world: build, run, and report what was seen."""
