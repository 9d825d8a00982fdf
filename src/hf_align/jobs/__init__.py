"""Commands that write a model. What comes in is what was asked; what goes out is a checkpoint with its documents.

`job.py` is the way that all of them go. A new command is one more `Job`: its inputs, its match, its weights.
"""
