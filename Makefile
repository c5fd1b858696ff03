# Every target makes the environment it needs; nothing has to be installed first but Python >= 3.11.
# With an environment of your own: make test VENV=path/to/venv

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
# Installed first and pinned: left to resolve torch itself, pip takes the newest, with gigabytes of CUDA packages.
TORCH ?= torch==2.13.0
PYTEST_ARGS ?= -n auto --dist worksteal
PLAN ?= configs/plans/gpt2.yaml

# Tests start some 150 processes: without compiled files, each compiles all of shardc first, for 1.3 s.
unexport PYTHONDONTWRITEBYTECODE

BIN := $(VENV)/bin
STAMP := $(VENV)/.shardc-installed

.PHONY: help demo test tests lint types docs format fuzz gate-kernels clean

help:
	@echo "make demo    compile GPT-2 from its plan, print the program, verify it against the single device"
	@echo "make test    lint, types, tests"
	@echo "make fuzz    5,000 random programs and 1,000 random plans of real models, each on a random mesh;"
	@echo "             models x meshes x microbatches x pipeline schedules, 2,000 random orders of execution;"
	@echo "             10,000 mutated program files;"
	@echo "             1,250 random kernels in Triton's interpreter, and 100 on a GPU if there is one"
	@echo "             (FUZZ_EXAMPLES=500 make fuzz: a tenth of all that); then the full form of each test of which"
	@echo "             make test runs a sample, and each property with more examples (pytest -m 'long or hypothesis')"
	@echo "make gate-kernels  compile every kernel for sm_90 and sm_80 without a GPU: spills and access widths, as JSON"
	@echo "make docs    build the documentation as a site, in build/site; a broken link is an error"
	@echo "make format  format and fix what ruff can"

$(STAMP): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(BIN)/pip install --quiet --disable-pip-version-check -e ".[test,examples]"
	touch $@

demo: $(STAMP)
	$(BIN)/shardc compile examples/gpt2.py:gpt2 --plan $(PLAN) --verify

test: $(STAMP)
	$(MAKE) lint
	$(MAKE) --jobs=2 types tests

tests: $(STAMP)
	$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/basedpyright --pythonpath $(BIN)/python

# In an environment of its own: it reads the sources, and imports nothing of them.
docs: build/docs-venv/.installed
	NO_MKDOCS_2_WARNING=1 build/docs-venv/bin/mkdocs build --quiet

build/docs-venv/.installed: pyproject.toml
	test -x build/docs-venv/bin/python || $(PYTHON) -m venv build/docs-venv
	build/docs-venv/bin/pip install --quiet --disable-pip-version-check "mkdocs-material>=9.5" "mkdocstrings[python]>=0.27"
	touch $@

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

fuzz: $(STAMP)
	$(BIN)/python -m pytest tests/properties tests/partition/test_equivalence.py tests/kernels/test_fused.py::test_random_kernels \
		tests/gpu/test_random_kernels.py -n auto --hypothesis-profile=fuzz
	$(BIN)/python -m pytest -m "long or hypothesis" -n auto --dist worksteal --hypothesis-profile=night

gate-kernels: $(STAMP)
	$(BIN)/python -m kernels_triton.gate.gate

clean:
	rm -rf .venv build dist *.egg-info
