"""Merging two models that share a basis: tensor by tensor, or by what their weights do together."""
