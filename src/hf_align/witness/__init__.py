"""Is aligned B still B? Both are run as `from_pretrained` runs them, before anything is written."""
