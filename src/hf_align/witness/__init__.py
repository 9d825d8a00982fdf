"""Is aligned B still B?

A model before and after it is moved comes in. Both are run as `from_pretrained` runs them, in every mode that inputs
can be made for. The largest change goes out, beside what rounding alone changes; a larger one is an error that names
the first module whose output moves.
"""
