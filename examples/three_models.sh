#!/bin/sh
# Merge three Llama models from three seeds: all into a basis that favours none of them, and then their mean.
set -eu
OUT=${1:-out/three_models}
hf-align merge examples/models/llama/0 examples/models/llama/1 examples/models/llama/2 -o "$OUT" \
    --data examples/data/eval_lm_kjv.safetensors --overwrite
