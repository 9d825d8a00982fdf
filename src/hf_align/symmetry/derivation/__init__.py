"""From an interpretation to a spec.

What the interpreter found comes in: gains are folded, scales solved for, layers that repeat extended by module path,
and what no call reads stands still. A `SymmetrySpec` goes out, kept for the next run of the same code.
"""
