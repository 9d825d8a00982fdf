"""The search for the element of each group that brings B closest to A.

A spec and the weights of two models or more come in, and inputs where the search runs the models. Elements go out, one
for each space. Every group knows its own nearest element, so nothing here knows which group it is.
"""
