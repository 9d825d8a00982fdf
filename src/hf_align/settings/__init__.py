"""What a user may ask for.

Words of the command line, arguments of the library and YAML come in; options that are checked go out. Nothing here
loads torch before it is needed.
"""
