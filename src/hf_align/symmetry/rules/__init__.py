"""The room of ops: of each its rule, its traits, and how it runs, in the file of its family.

A rule is one small function; its first line is the mathematics of the op.
"""

from importlib import import_module
from pkgutil import iter_modules

for _family in iter_modules(__path__):
    import_module(f"{__name__}.{_family.name}")
