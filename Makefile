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

demo: setup      ## complete real Python code with the shipped model, plain and recycled side by side
	$(RUN)/token-recycling compare models/target --prompts models/prompts --limit 4 --max-new-tokens 160

test: setup      ## all tests
	$(RUN)/python -m pytest

test-lowest:     ## all tests with the lowest versions that pyproject.toml allows, in .venv-lowest
	$(PYTHON) -m venv .venv-lowest
	.venv-lowest/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints-lowest.txt \
		--editable '.[dev]'
	.venv-lowest/bin/python -m pytest

BROWSER := $(shell command -v chromium || command -v chromium-headless-shell || command -v chromium-browser || \
	command -v google-chrome)

test-browser: setup ## the playground in a real browser: needs chromium (apt install chromium-headless-shell)
	@test -n "$(BROWSER)" || { echo "expected a browser: chromium, chromium-headless-shell, chromium-browser or" \
		"google-chrome; install one, as with: apt install chromium-headless-shell" >&2; exit 1; }
	$(RUN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[browser]'
	$(RUN)/python -m pytest tests/browser

lint: setup      ## format, lint and types
	$(RUN)/ruff format --check .
	$(RUN)/ruff check .
	$(RUN)/mypy

METHODS := generate prompt_lookup_hf:n=10 assisted:model=models/draft plain published recycling recycling:primed=true \
	recycling:tree=16 recycling:tree=80 suffix prompt_lookup lookahead draft_model:model=models/draft layer_skip

bench: setup     ## all methods side by side on the shipped models, generating and replaying: writes docs/results
	$(RUN)/token-recycling bench models/target --data models/prompts --repeats 1 --output docs/results --fresh \
		$(addprefix --method ,$(METHODS))
	$(RUN)/token-recycling bench models/target --data models/prompts --limit 16 --repeats 1 --max-new-tokens 96 \
		--output docs/results/batches --fresh --method generate --method recycling $(addprefix --batch ,1 2 4 8)

.PHONY: help setup demo test test-lowest test-browser lint bench
