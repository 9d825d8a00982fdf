"""What may be done to the weights of a program without changing what it computes.

Programs come in, one for each mode and length. Rules say how each op moves with its inputs, groups say what a space may
do, and gauges say which of several ways to write one function is the canonical one. A `SymmetrySpec` goes out: for each
axis of each weight the spaces that it moves with, and the action of their elements on tensors.
"""
