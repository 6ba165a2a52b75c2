# Main commands; `make` lists them. Tests in separate environments are in noxfile.py (`.venv/bin/nox --list`).
PYTHON ?= python3
VENV   ?= .venv
RUN    := $(VENV)/bin
# If the environment disables bytecode, every worker compiles all tests and the package again.
export PYTHONDONTWRITEBYTECODE :=

help:            ## list these commands
	@grep -hE '^[a-z-]+: .*##' Makefile | sed 's/:.*##/:/' | column -t -s:

# Modules are compiled at their first import; compiling all of them would take a third of pip's time.
$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(RUN)/python -m pip install --quiet --no-compile --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

setup: $(VENV)/.ready ## create a virtual environment with everything that demo, test and bench need

# Environment of `nox -s lowest`.
.nox/lowest/.ready: pyproject.toml constraints-lowest.txt
	$(PYTHON) -m venv --clear .nox/lowest
	.nox/lowest/bin/python -m pip install --quiet --no-compile --disable-pip-version-check \
		--constraint constraints-lowest.txt --editable '.[serving,test]'
	touch $@

demo: setup      ## a chat answer, JSON and an edit with SmolLM2-135M-Instruct (93 MB), plain and accelerated
	@$(RUN)/python -m benchmarks.demo

# Each worker starts with a contiguous part of the tests, so most servers and models of a folder are created once.
WORKERS := --numprocesses auto --maxprocesses 8 --dist worksteal
test: setup      ## run the tests required before every commit (three to ten minutes on two cores)
	$(RUN)/python -m pytest $(WORKERS)

ONE_FAMILY := test_trees_equal_linear_decoding_and_outputs_equal_generate[llama-sdpa]
QUICK := tests/trees tests/recycling tests/loop --deselect tests/loop/test_accept_sampled.py \
	'tests/model/test_architectures.py::$(ONE_FAMILY)'
test-quick: setup ## run tests of loop, trees, recycling and one model family (under a minute on two cores)
	$(RUN)/python -m pytest --numprocesses 2 $(QUICK)

test-all: setup  ## run all tests, with all families, soak, browser, ecosystem, engines, releases, the real model (hours)
	$(RUN)/nox -s install-browser
	REQUIRE_BROWSER=1 $(RUN)/python -m pytest -m "not real" $(WORKERS)
	$(RUN)/nox -s real ecosystem vllm sglang llama-cpp mlx lowest versions

# mkdocs-material would print a long notice about another product in every build.
SITE := NO_MKDOCS_2_WARNING=1 $(RUN)/mkdocs

lint: setup      ## check format, style, types, imports, and the site (dead links, missing references)
	$(RUN)/ruff format --check .
	$(RUN)/ruff check .
	$(RUN)/mypy
	$(RUN)/lint-imports
	$(RUN)/python scripts/glossary.py
	$(SITE) build --strict --quiet

docs: setup      ## build the site; open build/site/index.html, no server needed
	$(SITE) build --strict

# Path of the real model, which is downloaded on first use.
REAL = $(shell $(RUN)/python -m benchmarks.real_model)

# Text for the datastore of the drafter `rest`: modules of Python's standard library.
LIBRARY := . asyncio collections concurrent email http importlib json logging multiprocessing unittest urllib xml
build/library.datastore: $(VENV)/.ready
	mkdir -p build
	library=$$($(RUN)/python -c "import sysconfig; print(sysconfig.get_path('stdlib'))"); \
	$(RUN)/token-recycling datastore build $(foreach part,$(LIBRARY),$$library/$(part)/*.py) --model $(REAL) --output $@

SCENARIO ?= all
RESULTS ?= build/bench/$(SCENARIO)
BENCH = $(RUN)/token-recycling bench $(REAL) --scenario benchmarks/scenarios/$(SCENARIO).yaml --output $(RESULTS) && \
	$(RUN)/token-recycling report $(RESULTS) --clock processor
bench: setup build/library.datastore ## benchmark the real model on benchmarks/scenarios/SCENARIO=all.yaml (hours; prints an estimate first), into build/bench; resumes
	$(BENCH)

bench-quick: SCENARIO = quick
bench-quick: setup ## measure the README's chart and table, and the tables by job (25 to 80 minutes on two idle cores), into build/bench/quick; resumes
	$(BENCH)
	$(RUN)/python -m scripts.job_tables $(RESULTS)

bench-gpu: setup ## run all measurements on a CUDA device, into docs/results/gpu; resumes; DRY=1 for tiny models on the CPU
	$(RUN)/python -m benchmarks.gpu $(if $(DRY),--dry-run)

.PHONY: help setup demo test test-quick test-all lint docs bench bench-quick bench-gpu
