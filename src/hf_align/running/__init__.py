"""An architecture as a function of its weights.

A config, weights and inputs come in; the weights are held in memory, or read as they are needed. Outputs and losses go
out. Where there is no data, models write their inputs themselves.
"""
