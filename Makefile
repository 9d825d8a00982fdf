# Every target sets itself up in .venv with the pinned versions of constraints.txt.
PYTHON ?= python3
BIN := .venv/bin
OUT ?= out
# One thread each: on a few cores, processes side by side do more than threads that wait for each other.
TEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist loadfile

.PHONY: demo test test-slow lint golden bench clean

demo: .venv/installed  ## align and merge two trained models, with the barrier before and after
	$(BIN)/hf-align merge examples/models/gpt2/0 examples/models/gpt2/1 -o $(OUT)/demo \
		--data examples/data/eval_lm_kjv.safetensors --overwrite

test: .venv/installed  ## the tests, a few minutes
	$(TEST)

test-slow: .venv/installed  ## all tests
	$(TEST) -m ""

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

golden: .venv/installed  ## what the tests compare derived specs with, and the schema of overrides
	$(BIN)/python tests/golden/regenerate.py

bench: .venv/installed  ## every table under benchmarks/
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/barriers.py
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/merging.py
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/curves.py
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/line.py
	$(BIN)/python benchmarks/size.py
	$(BIN)/python benchmarks/coverage.py
	$(BIN)/python benchmarks/engine.py

# torch first and by its exact version: a range would fetch gigabytes of GPU libraries that nothing here needs.
.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test,plots,mergekit]'
	touch $@

clean:
	rm -rf .venv $(OUT) .pytest_cache .mypy_cache .ruff_cache
