"""What a merge says of itself.

What a job found comes in: its report, matches, losses and sources. A model card, a report as a page, and provenance go
out, and the folder goes to the Hub. Paths of this machine never do.
"""
