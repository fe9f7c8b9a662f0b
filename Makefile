# `make demo` and `make test` set up all they need in .venv; nothing else is required than Python 3.11 or later and make.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test test-all kill fuzz lint docs bench bench-others gpu triton wheel package clean

demo: .venv/ready
	$(BIN)/python -m attnforge.demo --out build/demo

# Bytecode is kept, whatever the environment says, for the workers and the sixty processes that tests start.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses auto --dist loadgroup

# The draw of the tests, which is another one with each commit; it is printed, and DRAW=NUMBER repeats it.
DRAW ?= $(or $(shell git rev-list --count HEAD 2>/dev/null),0)

# Every test function but thirteen and those of one server, Ray or Triton; of large catalogues with a part of their
# members: a fifth of the idioms and of the registered models, a quarter of the faults, for example
# (tests/support/tiers.py). 25 draws in a row have all members, and all functions but four.
test: .venv/ready .venv/triton
	ATTNFORGE_DRAW=$(DRAW) $(PYTEST)

# All of the tests.
test-all: .venv/ready .venv/triton
	$(PYTEST)

# Processes that write bundles, deploy and rebuild, killed at two hundred random moments: each time the old or the new
# bundle is whole.
kill: .venv/ready
	ATTNFORGE_KILLS=100 $(BIN)/python -m pytest -q tests/front/test_writing.py tests/front/test_killed.py -k killed

# Thousands of wrong manifests, files of bundles, ONNX graphs and input files, of another seed each time.
fuzz: .venv/ready
	ATTNFORGE_FUZZ=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q --hypothesis-show-statistics --numprocesses auto \
		--dist loadfile tests/fuzz

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache
	$(BIN)/mypy -p attnforge -p benchmarks -p tests

# The documentation as a site in build/site, which is read without a network; a warning is an error.
docs: .venv/ready
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# Every contender on every model, side by side; OLD=FILE compares with an earlier run.
bench: .venv/ready
	$(BIN)/python -m benchmarks run suite $(if $(OLD),--compare $(OLD))
	$(BIN)/python -m benchmarks pages

# What the suite leaves out: who fuses what, what the passes cost, what a Session adds.
bench-others: .venv/ready
	$(BIN)/python -m benchmarks run fusion
	$(BIN)/python -m benchmarks run scaling
	$(BIN)/python -m benchmarks run overhead
	$(BIN)/python -m benchmarks pages

# On a machine with a GPU: its tests, parity and latency of every backend; without one it exits with 3.
gpu: .venv/ready
	@$(BIN)/python -m benchmarks.gpu

# A Triton server beside the environment, for models of `attnforge package --for triton`, and how to start it.
triton: .venv/ready
	@$(BIN)/python -m benchmarks.servers.triton.server

.venv/triton: | .venv/ready
	$(BIN)/python -m benchmarks.servers.triton.server >/dev/null

wheel: .venv/ready
	rm -rf build/lib build/wheel && $(BIN)/pip wheel --quiet --no-deps --wheel-dir build/wheel .

# Checks that a wheel holds every package, its types and the weights, and works away from the source.
package: wheel
	$(BIN)/python tests/check_wheel.py build/wheel/*.whl

.venv/ready: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --upgrade pip
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[lint]'
	touch $@

clean:
	rm -rf .venv build dist *.egg-info
