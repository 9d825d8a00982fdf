"""A program read axis by axis.

A program comes in. Every axis of every value carries spaces, and the rule of each op (`symmetry/rules/`) says how far
these may be changed. What goes out is the interpretation: spaces with their bounds, and what ties them.
"""
