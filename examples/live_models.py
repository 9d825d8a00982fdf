"""The library on live models: align, see that the function stays, merge, and look at the line between both."""

import torch
from transformers import AutoModelForCausalLM

import hf_align

a, b = (AutoModelForCausalLM.from_pretrained(f"examples/models/gpt2/{seed}") for seed in "01")
alignment = hf_align.align(b, to=a)
moved = alignment.apply(b)
tokens = torch.arange(16)[None]
print(f"B moved, its logits changed by {(moved(tokens).logits - b(tokens).logits).abs().max():.1e}")
merged = hf_align.merge([a, b], align=alignment)
losses = hf_align.evaluate(a, b, "examples/data/eval_lm_kjv.safetensors", points=3, align=alignment)
print(f"barrier {losses.naive.barrier:.2f} as they are, {losses.aligned.barrier:.2f} aligned")
