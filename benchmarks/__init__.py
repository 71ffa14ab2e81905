"""Benchmarks: ratios between ways to do the same work, measured side by side in one process.

`python -m benchmarks` runs all, `python -m benchmarks.NAME` one; see README.md for what each measures and the figures.
"""
