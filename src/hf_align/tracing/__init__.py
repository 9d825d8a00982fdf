"""A model as a graph, in all the ways in which it can be called.

A config comes in, and is built without weights. Its calls are recorded on fake tensors, at its own size or as a small
copy. A program goes out: an FX graph over ATen ops with the names of its parameters, and the mode that it stands for.
"""
