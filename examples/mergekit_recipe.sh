#!/bin/sh
# An ordinary mergekit recipe with one more key.
set -eu
OUT=${1:-out/mergekit_recipe}
hf-align mergekit examples/recipe.yml "$OUT" --overwrite
