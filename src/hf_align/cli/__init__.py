"""The command line: a file for each command, which says what it takes and calls the library.

Nothing here loads torch or transformers: what a command needs it imports when it runs, so that help, completion and
refusals of options come at once.
"""
