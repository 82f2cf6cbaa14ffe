# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# A file of tests at a time in each of a few processes: what they compute is small. In the order of tests/conftest.py.
PYTEST := $(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder
INSTALLED := $(VENV)/.installed
CLIENTS := tests/clients
BUF := $(CLIENTS)/node_modules/.bin/buf
# Empty where there is no npm. What needs it is skipped there, and says so.
NPM_INSTALLED := $(if $(shell command -v npm),$(CLIENTS)/node_modules/.package-lock.json)

.PHONY: setup scheduler-code native-code demo test test-interpreted check format proto lint-proto release-proto test-clients train bench bench-core clean

setup: scheduler-code native-code  ## install, compile the scheduler, and compile the native code ahead of its first use

scheduler-code: $(INSTALLED)
	$(BIN)/python -m paceline.compiled

native-code: $(INSTALLED)
	$(BIN)/python -m paceline_kernels.cpu

demo: $(INSTALLED)  ## serve the embedded pair, drive it over gRPC, print texts and a table
	$(BIN)/python -m paceline.demo

test: $(INSTALLED)  ## every test
	$(PYTEST)

test-interpreted: $(INSTALLED)  ## those of the scheduler, as it is without a C compiler
	PACELINE_COMPILED=0 $(PYTEST) tests/core tests/sim tests/engine

check: $(INSTALLED)  ## format, lint, types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

proto: $(INSTALLED)  ## regenerate scheduler/paceline/v1
	$(BIN)/python -m grpc_tools.protoc -I proto --python_out=scheduler --pyi_out=scheduler --grpc_python_out=scheduler proto/paceline/v1/*.proto

# Against an image in the repository, not against a git ref: a clone of main has no older main, and may have no history.
# The image is the contract that clients rely on; whoever releases a version makes it anew by `make release-proto`.
lint-proto: $(NPM_INSTALLED)  ## the contract's style, and that nothing in it breaks clients that there are
ifdef NPM_INSTALLED
	$(BUF) lint proto
	$(BUF) breaking proto --against proto/released.binpb
else
	@echo "lint-proto: skipped, because there is no npm here"
endif

release-proto: $(NPM_INSTALLED)
	$(BUF) build proto --exclude-source-info -o proto/released.binpb

test-clients: $(INSTALLED) $(NPM_INSTALLED)  ## other makers' gRPC clients, and ours, against a server
	$(BIN)/python $(CLIENTS)/run.py

$(CLIENTS)/node_modules/.package-lock.json: $(CLIENTS)/package.json
	cd $(CLIENTS) && npm install --no-package-lock --no-audit --no-fund --ignore-scripts --loglevel=error
	touch $@

train: $(INSTALLED)  ## train the embedded pair anew (about an hour on two cores)
	$(BIN)/python -m paceline.demo.train

bench: $(INSTALLED)  ## the README's throughput table
	$(BIN)/paceline bench throughput --model demo --draft demo --concurrency 1,4,16 --depth off,2,4,auto

bench-core: $(INSTALLED)  ## the scheduler's own time per step, compiled
	$(BIN)/python -m paceline.compiled
	$(BIN)/paceline bench core

# torch first and by its exact version: an open range would admit a build with gigabytes of CUDA libraries.
$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -c constraints.txt $$(grep '^torch==' constraints.txt)
	$(BIN)/pip install --quiet -c constraints.txt -e '.[serve,loadtest,dev]'
	touch $@

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache build/clients $(CLIENTS)/node_modules
