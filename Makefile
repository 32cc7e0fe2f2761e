# Two commands: `make demo` sweeps compression settings and says which one to use; `make test` checks everything.
# They need Python 3.11 or newer and make; packages go into .venv, at the versions of constraints.txt.

# `make test PYTHON=python3.13 CONSTRAINTS=constraints-oldest.txt` uses another interpreter, and other versions in an environment of their own.
PYTHON ?= python3
CONSTRAINTS ?= constraints.txt
VENV ?= .venv$(patsubst constraints%,%,$(basename $(CONSTRAINTS)))
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check -c $(CONSTRAINTS)

export RAY_USAGE_STATS_ENABLED := 0
unexport PYTHONDONTWRITEBYTECODE # commands and Ray's workers start a tenth faster from bytecode, and tests are collected in half the time

.PHONY: demo test test-fast test-slow test-cluster campaign gpu-bundle test-gpu lint types types-code types-tests dist image docs notation llms findings golden picture clean

demo: $(VENV)/installed
	rm -rf results/demo results/demo-dense
	$(BIN)/raysim train digits-cnn steps=150 num_microbatches=2 checkpoint_at_steps=[100] --engine inline --out results/demo-dense
	$(BIN)/raysim sweep quickstart steps=50 start=results/demo-dense@100 --seeds 16 --race --out results/demo
	$(BIN)/raysim report results/demo --network 100mbps

# Types are checked by the newest versions' stubs alone, for the oldest Python: CI checks them once, in a job of their own.
test: lint $(if $(filter constraints.txt,$(CONSTRAINTS)),types) test-fast

test-fast: $(VENV)/installed-dev
	$(BIN)/python -m pytest -m "not slow" -n 2

test-slow: $(VENV)/installed-dev
	$(BIN)/python -m pytest -m slow -n 2

test-cluster: $(VENV)/installed-dev
	$(BIN)/python -m pytest -m slow -s tests/sweeps/test_real_cluster.py

SHARE ?= 1
RECORD ?= build/campaign.jsonl
campaign: $(VENV)/installed-dev
	$(BIN)/python benchmarks/campaign --share $(SHARE) --record $(RECORD)

BUNDLE ?= build/gpu-bundle
GPU_PYTHON ?= 3.12
DEVICE ?= cuda

# What a GPU machine without a network lacks, in one folder; `make test-gpu` there (or `python3 check.py`) needs nothing else.
gpu-bundle: $(VENV)/installed-dev
	$(BIN)/python benchmarks/offline/bundle.py $(BUNDLE) --python $(GPU_PYTHON) $(if $(RAY),--ray)

test-gpu:
	$(PYTHON) $(BUNDLE)/check.py --out $(BUNDLE)/results --device $(DEVICE)

lint: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/installed-dev
	$(MAKE) -j 2 types-code types-tests

types-code:
	$(BIN)/mypy

types-tests:
	$(BIN)/mypy --config-file tests/mypy.ini

# The distributions, from an archive of each, checked, and raysim tried in an environment that has nothing else.
dist: $(VENV)/installed
	$(PIP) -e '.[release]'
	rm -rf dist build/empty
	for folder in . contrib benchmarks findings; do $(BIN)/python -m build --outdir dist $$folder || exit 1; done
	$(BIN)/twine check --strict dist/*
	$(BIN)/check-wheel-contents dist/*.whl
	$(PYTHON) -m venv build/empty
	build/empty/bin/python -m pip install -qq --disable-pip-version-check -c $(CONSTRAINTS) dist/*.whl
	cd build && empty/bin/raysim train digits-cnn steps=20 forward='TopK(0.1)' --engine inline --out empty/run && empty/bin/raysim replay empty/run --network 100mbps

# A container image with Ray and raysim, from the wheel of `make dist`; `make image EXTRAS=hub` with transformers and datasets.
image:
	rm -rf build/image && mkdir -p build/image
	cp docker/* constraints.txt dist/raysim-*.whl build/image/
	docker build --build-arg EXTRAS=$(EXTRAS) --tag raysim build/image

docs: $(VENV)/installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

picture: $(VENV)/installed-dev
	$(BIN)/raysim report results/demo -o build/report.html --network 20mbps --network 100mbps --network 500mbps --network 1gbps+20ms --only
	$(BIN)/python docs/make_picture.py build/report.html

golden: $(VENV)/installed-dev
	PYTHONPATH=tests/support $(BIN)/python tests/codecs/test_laws.py

findings: $(VENV)/installed-dev
	RAYSIM_CACHE=build/cache $(BIN)/python findings/pages/make_findings.py
	RAYSIM_CACHE=build/cache $(BIN)/python findings/pages/draw_frontier.py

notation: $(VENV)/installed-dev
	$(BIN)/python docs/generate_notation.py

llms: $(VENV)/installed-dev
	$(BIN)/python docs/generate_llms.py

$(VENV)/installed: pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "raysim needs Python 3.11 or newer")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) -e .
	touch $@

$(VENV)/installed-dev: $(VENV)/installed contrib/pyproject.toml benchmarks/pyproject.toml findings/pyproject.toml
	$(PIP) -e '.[dev,hub]' -e ./contrib -e ./benchmarks -e ./findings
	touch $@

$(VENV)/installed-docs: $(VENV)/installed
	$(PIP) -e '.[docs]'
	touch $@

clean:
	rm -rf .venv .venv-oldest build dist
