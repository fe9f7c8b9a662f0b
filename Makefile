# `make demo` and `make test` set up what they need in .venv; nothing else is required than Python 3.11 or later and make.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test quick kill fuzz lint docs bench bench-others gpu triton wheel package clean

demo: .venv/demo
	$(BIN)/python -m attnforge.demo --out build/demo

# Bytecode is kept, whatever the environment says, for the workers and the processes that tests start.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses auto --dist loadgroup

# Every test.
test: .venv/ready .venv/triton
	$(PYTEST)

# Those that deploy nothing: bundles that are kept in tests/golden, graphs and formulas.
quick: .venv/ready
	$(PYTEST) -m "not slow"

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

# The demo needs three extras; everything else needs all of them, and the demo's are among those.
.venv/demo: EXTRAS := data,openvino,report
.venv/ready: EXTRAS := lint
.venv/demo .venv/ready: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --upgrade pip
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[$(EXTRAS)]'
	touch .venv/demo $@

clean:
	rm -rf .venv build dist *.egg-info
