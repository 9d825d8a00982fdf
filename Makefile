# Every target sets itself up in .venv with the pinned versions of constraints.txt.
PYTHON ?= python3
BIN := .venv/bin
OUT ?= out
# One thread each: on a few cores, processes side by side do more than threads that wait for each other.
# Bytecode is kept, whatever the machine says: tests start hundreds of interpreters.
TEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist loadfile

.PHONY: demo test test-slow durations lint docs golden bench coverage clean

demo: .venv/installed  ## align and merge two trained models, with the barrier before and after
	$(BIN)/hf-align merge examples/models/gpt2/0 examples/models/gpt2/1 -o $(OUT)/demo \
		--data examples/data/eval_lm_kjv.safetensors --points 3 --overwrite

test: .venv/installed  ## the quick tests: less than five minutes on two cores
	$(TEST)

test-slow: .venv/installed  ## all tests, those that take minutes each too
	$(TEST) --no-loadscope-reorder -m "" --timeout 1800

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

durations: .venv/installed  ## which of the quick tests have become slow (WHICH='-m ""': of all); writes tests/slow.txt
	mkdir -p $(OUT)
	$(TEST) $(WHICH) --durations=0 -vv > $(OUT)/durations.txt || true
	$(BIN)/python tests/slow.py $(OUT)/durations.txt

golden: .venv/installed  ## specs/derived, the schema of overrides, and what the tests compare derived specs with
	$(BIN)/python tests/golden/regenerate.py

docs: .venv/installed  ## the pages, as a site under out/site
	$(BIN)/python -m mkdocs build --strict

bench: .venv/installed coverage  ## every table under benchmarks/
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/barriers.py
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/merging.py
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/curves.py
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/line.py
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/picture.py
	$(BIN)/python benchmarks/size.py
	$(BIN)/python benchmarks/engine.py
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/witness.py

coverage: .venv/coverage  ## the table of all architectures; resumes where it stopped
	$(BIN)/python benchmarks/coverage.py

# torch first and by its exact version: a range would fetch gigabytes of GPU libraries that nothing here needs.
.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test,plots,mergekit,docs,tasks]'
	touch $@

# Beside the environment and not in it: torchvision's wheels are built for another torch, and break what finds them.
.venv/coverage: .venv/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $@ -c constraints.txt \
		timm torchvision
	touch $@

clean:
	rm -rf .venv $(OUT) .pytest_cache .mypy_cache .ruff_cache
