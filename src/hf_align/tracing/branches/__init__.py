"""The branches of the code that a model brings along."""
