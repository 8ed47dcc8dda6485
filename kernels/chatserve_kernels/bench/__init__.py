"""Measurements of the kernels beside their public rivals and the machine's own limits."""
