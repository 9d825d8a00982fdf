"""The library: what `import hf_align` offers. Live models, state dicts with a config, folders and Hub ids come in, and
the same kind of thing goes out. Each file holds one verb; what they share is how a model is taken in (`given`) and how
data is (`examples`)."""
