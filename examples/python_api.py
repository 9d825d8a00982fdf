"""Merge two models from Python, and say whether alignment helped."""

import sys

import hf_align

output = sys.argv[1] if len(sys.argv) > 1 else "out/python_api"
models = ["examples/models/vit/0", "examples/models/vit/1"]
data = "examples/data/eval_digits.safetensors"
report = hf_align.merge(models, output_dir=output, data=data, overwrite=True)
print(*report.notes, sep="\n")
