# What people use. `make` alone says what there is; tests in environments of their own are in noxfile.py (`.venv/bin/nox --list`).
PYTHON ?= python3
VENV   ?= .venv
RUN    := $(VENV)/bin
# An environment that switches bytecode off would have every worker compile all tests and the package again.
export PYTHONDONTWRITEBYTECODE :=

help:            ## this list
	@grep -hE '^[a-z-]+: .*##' Makefile | sed 's/:.*##/:/' | column -t -s:

# Modules are compiled when they are first imported: to compile all of them takes pip a third of its time.
$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(RUN)/python -m pip install --quiet --no-compile --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

setup: $(VENV)/.ready ## a virtual environment with everything that demo, test and bench need

# What `nox -s lowest` runs in.
.nox/lowest/.ready: pyproject.toml constraints-lowest.txt
	$(PYTHON) -m venv --clear .nox/lowest
	.nox/lowest/bin/python -m pip install --quiet --no-compile --disable-pip-version-check \
		--constraint constraints-lowest.txt --editable '.[serving,test]'
	touch $@

demo: setup      ## a chat answer, JSON and an edit by SmolLM2-135M-Instruct (93 MB), plain and accelerated
	@$(RUN)/python -m benchmarks.demo

# Each worker begins with a half of the tests in one piece, so that servers and models of a folder are mostly made once.
WORKERS := --numprocesses auto --maxprocesses 8 --dist worksteal
test: setup      ## the tests to run before every commit: five to ten minutes on two cores
	$(RUN)/python -m pytest $(WORKERS)

ONE_FAMILY := test_trees_equal_linear_decoding_and_outputs_equal_generate[llama-sdpa]
QUICK := tests/trees tests/recycling tests/loop --deselect tests/loop/test_accept_drawn.py \
	'tests/model/test_architectures.py::$(ONE_FAMILY)'
test-quick: setup ## under a minute on two cores: loop, trees, recycling, one family; run it as you work
	$(RUN)/python -m pytest --numprocesses 2 $(QUICK)

test-all: setup  ## everything: all families, soak, browser, ecosystem, engines, releases and the real model (hours)
	$(RUN)/nox -s install-browser
	REQUIRE_BROWSER=1 $(RUN)/python -m pytest -m "not real" $(WORKERS)
	$(RUN)/nox -s real ecosystem vllm sglang llama-cpp mlx lowest versions

# The notice of mkdocs-material's authors about another product of theirs would be the longest line of every build.
SITE := NO_MKDOCS_2_WARNING=1 $(RUN)/mkdocs

lint: setup      ## format, lint, types, imports, and the site: dead links, missing references
	$(RUN)/ruff format --check .
	$(RUN)/ruff check .
	$(RUN)/mypy
	$(RUN)/lint-imports
	$(RUN)/python scripts/glossary.py
	$(SITE) build --strict --quiet

docs: setup      ## the site, in build/site: open build/site/index.html, no server is needed
	$(SITE) build --strict

# The real model: one path, downloaded on first use.
REAL = $(shell $(RUN)/python -m benchmarks.real_model)

# Past text for the drafter rest: modules of Python's own library.
LIBRARY := . asyncio collections concurrent email http importlib json logging multiprocessing unittest urllib xml
build/library.datastore: $(VENV)/.ready
	mkdir -p build
	library=$$($(RUN)/python -c "import sysconfig; print(sysconfig.get_path('stdlib'))"); \
	$(RUN)/token-recycling datastore build $(foreach part,$(LIBRARY),$$library/$(part)/*.py) --model $(REAL) --output $@

SCENARIO ?= all
RESULTS ?= build/bench/$(SCENARIO)
BENCH = $(RUN)/token-recycling bench $(REAL) --scenario benchmarks/scenarios/$(SCENARIO).yaml --output $(RESULTS) && \
	$(RUN)/token-recycling report $(RESULTS) --clock processor
bench: setup build/library.datastore ## the real model on benchmarks/scenarios/SCENARIO=all.yaml (hours; it says first how many), into build/bench; resumes
	$(BENCH)

bench-quick: SCENARIO = quick
bench-quick: setup ## the README's picture and table, and the tables by job, 40 to 80 minutes on two quiet cores, into build/bench/quick; resumes
	$(BENCH)
	$(RUN)/python -m scripts.job_tables $(RESULTS)

bench-gpu: setup ## everything that is measured on a CUDA device, into docs/results/gpu; resumes; DRY=1: tiny, on the CPU
	$(RUN)/python -m benchmarks.gpu $(if $(DRY),--dry-run)

.PHONY: help setup demo test test-quick test-all lint docs bench bench-quick bench-gpu
