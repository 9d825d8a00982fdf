"""What a run stands on: devices, processes that run together, and how far it is.

Nothing here knows of models.
"""
