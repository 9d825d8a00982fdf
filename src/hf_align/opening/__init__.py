"""Models opened to be aligned.

Folders, ids and adapters come in. What goes out is one architecture with its spec, and the weights of each model by
name in memory: heads dropped where they differ, widths, depths and vocabularies brought together, or a refusal.
"""
