"""Weights on disk and on the Hub: read by slices, named as in memory, written shard by shard."""
