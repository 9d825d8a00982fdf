"""mergekit's recipes and methods on models that do not share a basis.

mergekit is under the LGPL: it is an extra that is imported when it is asked for, and nothing here is taken from it.
"""
