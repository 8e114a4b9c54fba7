# Everything runs in one virtual environment: $VIRTUAL_ENV where one is active, else .venv.
# A torch in the range >=2.11,<2.14 that is already there (a CUDA build, say) is kept.
PYTHON ?= python3
VENV ?= $(or $(VIRTUAL_ENV),.venv)
BIN := $(VENV)/bin
ARTIFACT ?= artifacts/relevance.cpu
TORCH ?= torch==2.13.0
FUZZ_SECONDS ?= 600
STAMP := $(VENV)/.dagserve-setup
BUILT := $(VENV)/.dagserve-native
SOURCES := $(shell find native -name '*.cc' -o -name '*.h' -o -name CMakeLists.txt)

.PHONY: setup native demo test test-gpu fuzz release-check lint format perf serve clean

setup: $(BUILT)

$(STAMP): requirements.lock pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python tools/torch_in_range.py || $(BIN)/python -m pip install -q $(TORCH)
	$(BIN)/python -m pip install -q --no-deps -r requirements.lock
	touch $(STAMP)

$(BUILT): $(STAMP) $(SOURCES)
	$(MAKE) native
	touch $(BUILT)

# No build isolation: an isolated build would install a torch of its own.
native:
	$(BIN)/python -m pip install -q --no-build-isolation --no-deps -e .

demo: setup
	$(BIN)/python -m demo.run

test: setup
	$(BIN)/python -m pytest -m "not gpu"

test-gpu: setup
	$(BIN)/python -m pytest -m gpu

# Each target of native/fuzz for FUZZ_SECONDS: under libFuzzer where there is clang, else with random changes of seeds.
fuzz: setup
	$(BIN)/python -m tools.fuzz --artifact $(ARTIFACT) --seconds $(FUZZ_SECONDS)

# All that must pass before a release: 10 minutes a fuzz target by default.
release-check: lint test fuzz

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/clang-format --dry-run -Werror $(shell git ls-files 'native/*.cc' 'native/*.h')

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(shell git ls-files 'native/*.cc' 'native/*.h')

perf: setup
	$(BIN)/python -m perf.serve_cpu

serve: setup
	$(BIN)/dagserve serve $(ARTIFACT)

clean:
	rm -rf build artifacts .mypy_cache .ruff_cache .pytest_cache
