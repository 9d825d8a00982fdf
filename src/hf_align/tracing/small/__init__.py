"""Small copies of an architecture.

A config comes in. One of the same code goes out, with tiny sizes, or with whatever sizes still run: what is proved of
it is cheap to count.
"""
