# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: setup demo test check format proto train bench bench-core clean

setup: $(INSTALLED)  ## install, and compile the native code ahead of its first use
	$(BIN)/python -m paceline_kernels.cpu

demo: $(INSTALLED)  ## serve the embedded pair, drive it over gRPC, print texts and a table
	$(BIN)/python -m paceline.demo

test: $(INSTALLED)  ## every test
	$(BIN)/python -m pytest

check: $(INSTALLED)  ## format, lint, types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

proto: $(INSTALLED)  ## regenerate scheduler/paceline/v1
	$(BIN)/python -m grpc_tools.protoc -I proto --python_out=scheduler --pyi_out=scheduler --grpc_python_out=scheduler proto/paceline/v1/*.proto

train: $(INSTALLED)  ## train the embedded pair anew (about an hour on two cores)
	$(BIN)/python -m paceline.demo.train

bench: $(INSTALLED)  ## the README's throughput table
	$(BIN)/paceline bench throughput --model demo --draft demo --concurrency 1,4,16 --depth off,2,4,auto

bench-core: $(INSTALLED)  ## the scheduler's own time per step
	$(BIN)/paceline bench core

# torch first and by its exact version: an open range would admit a build with gigabytes of CUDA libraries.
$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -c constraints.txt $$(grep '^torch==' constraints.txt)
	$(BIN)/pip install --quiet -c constraints.txt -e '.[serve,loadtest,dev]'
	touch $@

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache
