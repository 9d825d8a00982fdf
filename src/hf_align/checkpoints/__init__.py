"""Weights on disk and on the Hub.

A folder, an id or an adapter comes in: what is read of it is its headers, and slices of its tensors by their names in
memory. Tensors by name go out, written shard by shard into a folder that one run has claimed. Nothing here knows of
models or symmetries.
"""
