"""What the groups do not hold: ways to write one function with several weights, and which of them is canonical.

The interpretation of a program comes in. Gauges go out, in the order in which they must be fixed; each rewrites single
tensors from a few others.
"""
