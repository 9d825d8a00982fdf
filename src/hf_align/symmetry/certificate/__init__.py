"""The proof that a spec is sound and complete, on a small copy with random weights in float64.

A program and its spec come in. Random elements are held against the function, and the null directions of its
derivative are counted. A certificate goes out: the largest change, and how many directions are moved, fixed, flat and
open.
"""
