#!/bin/sh
# Merge two GPT-2 models that were trained from different seeds, and draw what happened.
set -eu
OUT=${1:-out/two_models}
hf-align merge examples/models/gpt2/0 examples/models/gpt2/1 -o "$OUT" \
    --data examples/data/eval_lm_kjv.safetensors --certify --overwrite
hf-align report "$OUT"    # open $OUT/report.html in a browser
