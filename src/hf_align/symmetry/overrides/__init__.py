"""Reviewed overrides of derived specs.

A file for a model type comes in; it can pin spaces, bound or tie them, and name calls to trace. A spec goes out.
"""
