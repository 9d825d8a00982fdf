"""`python -m hf_align`."""

from hf_align.cli import main

main()
