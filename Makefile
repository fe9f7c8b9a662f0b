# `make demo` and `make test` install what they need into .venv; they require only Python 3.11 or later and make.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test quick kill fuzz lint docs docs-version bench bench-others gpu triton dist images lowest faults matrix clean

demo: .venv/demo
	$(BIN)/attnforge demo --out build/demo

# Bytecode is written, whatever the environment says, for the workers and the processes that tests start.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses auto --dist loadgroup

# Every test.
test: .venv/ready .venv/triton
	$(PYTEST)

# Tests that deploy nothing: golden bundles in tests/golden, graphs and formulas.
quick: .venv/ready
	$(PYTEST) -m "not slow"

# Kill processes that write bundles, deploy and rebuild at two hundred random moments: each time the old or the new
# bundle must be complete.
kill: .venv/ready
	ATTNFORGE_KILLS=100 $(BIN)/python -m pytest -q tests/front/test_writing.py tests/front/test_killed.py -k killed

# Thousands of invalid manifests, bundle files, ONNX graphs and input files, with a new seed each time.
fuzz: .venv/ready
	ATTNFORGE_FUZZ=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q --hypothesis-show-statistics --numprocesses auto \
		--dist loadfile tests/fuzz

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell
	$(BIN)/lint-imports --no-cache
	$(BIN)/mypy -p attnforge -p benchmarks -p tests

# Build the documentation in build/site, readable offline; warnings are errors.
docs: .venv/ready
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# Commit the documentation as this version's on the branch gh-pages; PUSH=--push pushes it.
docs-version: .venv/ready
	NO_MKDOCS_2_WARNING=1 $(BIN)/mike deploy $(PUSH) --update-aliases \
		$$($(BIN)/python -c 'from attnforge import __version__; print(__version__)') latest
	NO_MKDOCS_2_WARNING=1 $(BIN)/mike set-default $(PUSH) latest

# Every contender on every model, side by side; OLD=FILE compares with an earlier run.
bench: .venv/ready
	$(BIN)/python -m benchmarks run suite $(if $(OLD),--compare $(OLD))
	$(BIN)/python -m benchmarks pages

# Experiments outside the suite: fusion by other tools, cost of the passes, overhead of a Session.
bench-others: .venv/ready
	$(BIN)/python -m benchmarks run fusion
	$(BIN)/python -m benchmarks run scaling
	$(BIN)/python -m benchmarks run overhead
	$(BIN)/python -m benchmarks pages

# Every seeded fault in every subject at every precision: minutes to hours.
faults: .venv/ready
	$(BIN)/python -m benchmarks run faults
	$(BIN)/python -m benchmarks run export-faults

# Every form of attention with every release of ONNX Runtime and OpenVINO.
matrix: .venv/ready
	$(BIN)/python -m benchmarks run matrix

# On a machine with a GPU: GPU tests, parity and latency of every backend. Without a GPU it exits with 3.
gpu: .venv/ready
	@$(BIN)/python -m benchmarks.gpu

# Install a Triton server for models of `attnforge package --for triton`, and print how to start it.
triton: .venv/ready
	@$(BIN)/python -m benchmarks.servers.triton.server

.venv/triton: | .venv/ready
	$(BIN)/python -m benchmarks.servers.triton.server >/dev/null

# Build the sdist, and the wheel from it, in dist/, and check both in an empty environment; TAG=v1.2.3 must be their
# version.
dist: .venv/ready
	rm -rf dist && $(BIN)/python -m build --outdir dist . >/dev/null
	$(BIN)/twine check --strict dist/*
	$(BIN)/python tests/release/check_dist.py dist $(TAG)

# What the Dockerfiles in serving/images say, in empty environments in place of containers.
images:
	$(PYTHON) tests/release/check_images.py

# The tests of `make quick` with the lowest versions that pyproject.toml allows.
lowest:
	$(PYTHON) -m venv --clear build/lowest
	build/lowest/bin/pip install --quiet --disable-pip-version-check --upgrade pip
	build/lowest/bin/pip install --quiet --disable-pip-version-check --constraint tests/release/lowest.txt -e '.[test]'
	OMP_NUM_THREADS=1 build/lowest/bin/python -m pytest -q -m "not slow" --numprocesses auto --dist loadgroup

# The demo needs three extras; everything else needs all of them.
.venv/demo: EXTRAS := data,openvino,report
.venv/ready: EXTRAS := lint
.venv/demo .venv/ready: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --upgrade pip
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[$(EXTRAS)]'
	touch .venv/demo $@

clean:
	rm -rf .venv build dist *.egg-info
