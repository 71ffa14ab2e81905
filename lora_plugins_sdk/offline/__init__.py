"""Tools for adapters and checkpoints as files: merge, inspect, diff. No model is built and no GPU is needed."""
