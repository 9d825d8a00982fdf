"""Merge Hugging Face models that were never meant to be merged."""

__version__ = "0.1.0"
