"""An architecture that nobody has described to hf-align: its symmetries are derived from its graph, and proved.

The model is any class that transformers registers; here a small Qwen3 with random weights. B is A in another basis, so
a right alignment finds A again and their average is A itself.
"""

import sys
from pathlib import Path

import torch
import transformers

from hf_align.options import Options
from hf_align.pipeline import merge
from hf_align.symmetry.certificate.certify import certify
from hf_align.symmetry.certificate.random_copy import random_elements, transform
from hf_align.symmetry.derive import derive
from hf_align.tracing.reduce import reduced
from hf_align.tracing.trace import trace

output = Path(sys.argv[1] if len(sys.argv) > 1 else "out/new_architecture")
config = transformers.Qwen3Config(
    vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, max_position_embeddings=32, tie_word_embeddings=False,
    architectures=["Qwen3ForCausalLM"],
)  # fmt: skip

certificate = certify(reduced(config))
print(f"sound to {certificate.max_error:.0e}, {certificate.found} of {certificate.nullity} continuous dimensions found")

torch.manual_seed(0)
model = transformers.Qwen3ForCausalLM(config)
model.save_pretrained(output / "a")
spec = derive(trace(config))
weights = {name: tensor.detach() for name, tensor in model.named_parameters()}
moved = transform(spec, weights, random_elements(spec, torch.Generator().manual_seed(1)))
with torch.no_grad():
    for name, parameter in model.named_parameters():
        parameter.copy_(moved[name])
model.save_pretrained(output / "b")

report = merge(str(output / "a"), str(output / "b"), output / "merged", Options(overwrite=True, quiet=True))
print(f"distance of the weights {report.distance_before:.3g} -> {report.distance_after:.3g}")
