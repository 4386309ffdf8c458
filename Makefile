# Everything runs in .venv, which each target creates, and updates when pyproject.toml or constraints.txt change.
PYTHON ?= python3
BIN := .venv/bin
export MPLBACKEND := Agg

.PHONY: demo test test-all test-gpu test-faults lint types format figures bench docs notebooks clean

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	# without its dependency torchvision, which does not load next to the CPU build of torch
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps timm
	touch $@

demo: .venv/installed
	$(BIN)/equipoise demo

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/python tools/check_figures.py

# Numbers and charts of README and docs, from the committed results.
figures: .venv/installed
	$(BIN)/python bench/accelerate_tables.py --write
	$(BIN)/python tools/check_figures.py --write

format: .venv/installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: .venv/installed
	$(BIN)/mypy

# Tests of a group, which import the same slow packages, run in one worker.
test: .venv/installed lint types
	$(BIN)/pytest -n 2 --dist loadgroup

# Also the slow tests; hypothesis draws new examples in every run.
test-all: .venv/installed lint types
	$(BIN)/pytest -n 2 --dist loadgroup -m 'not gpu' --hypothesis-profile random

# Without .venv: torch and the other packages must be installed for $(PYTHON).
test-gpu:
	PYTHONPATH=src $(PYTHON) -m pytest -m gpu

# An hour on two cores: kills, wrong input, concurrent runs and sanitizers at length. Writes docs/reliability.md.
test-faults: .venv/installed
	OMP_NUM_THREADS=1 PYTHONPATH=tests/helpers:tests/faults $(BIN)/python -m harness --page docs/reliability.md

bench: .venv/installed
	$(BIN)/python bench/topology.py
	$(BIN)/python bench/correction.py
	$(BIN)/python bench/attack.py
	$(BIN)/python bench/robust.py
	$(BIN)/python bench/cpu.py
	$(BIN)/python bench/deploy.py

.venv/docs-installed: .venv/installed
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	touch $@

# The site, in build/site. A warning or a dead link is an error.
docs: .venv/docs-installed
	$(BIN)/equipoise recipe --keys > docs/recipe-keys.md
	$(BIN)/python tools/command_page.py > docs/command-line.md
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# Runs the notebooks in examples/ and keeps their outputs in them.
notebooks: .venv/docs-installed
	OMP_NUM_THREADS=2 $(BIN)/jupyter nbconvert --execute --inplace examples/*.ipynb

clean:
	rm -rf .venv build dist src/*.egg-info
