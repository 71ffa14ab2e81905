"""Adapters in the terms of the engines that serve them. Needs no torch: tensors are only sliced and copied."""
