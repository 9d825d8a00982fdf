"""Merge two models from Python, and say whether alignment helped."""

import sys
from pathlib import Path

from hf_align.jobs.pipeline import merge
from hf_align.settings.options import Options

output = Path(sys.argv[1] if len(sys.argv) > 1 else "out/python_api")
models = Path("examples/models/vit")
data = Path("examples/data/eval_digits.safetensors")
report = merge(str(models / "0"), str(models / "1"), output, Options(overwrite=True, quiet=True), data)
print(*report.notes, sep="\n")
