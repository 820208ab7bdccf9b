# Everything runs in .venv, which is created from setup.cfg and pyproject.toml: each target installs what it needs, with
# uv where there is one.
PYTHON  ?= python3
PYTORCH ?= python3
VENV    := .venv
BIN     := $(VENV)/bin
INSTALL := $(if $(shell command -v uv),uv pip install --quiet --python $(BIN)/python,$(BIN)/python -m pip install --quiet --disable-pip-version-check)

.PHONY: setup train smoke test test-cluster test-all test-versions test-colab test-vertex errors faults random-programs keras-tests compare docs docs-links lint format types check clean

# For training and serving, for the tests, and for the documentation.
RUN  := $(VENV)/with-serve
TEST := $(VENV)/with-dev
DOCS := $(VENV)/with-docs

setup: $(TEST) $(DOCS)

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/with-%: setup.cfg pyproject.toml | $(BIN)/python
	$(INSTALL) -e .[$*]
	touch $@

train: $(RUN)
	$(BIN)/python -m tfdist.train --strategy=mirrored --virtual_devices=2 --dataset=shapes \
	  --image_size=64,64 --base_filters=16 --depth=3 --train_examples=1600 --epochs=5 \
	  --learning_rate=3e-3 --loss=cross_entropy_dice --run_dir=runs/demo

# Half a minute of everything: flags, a step under each strategy, a checkpoint, a prediction, a placement, a report.
smoke: $(TEST)
	$(BIN)/python -m pytest -m smoke

# On two cores; some tests wait for processes, so there are three at a time. The other variants of thorough tests are in
# test-all, and clusters in test-cluster.
test: $(TEST)
	$(BIN)/python -m pytest -n 3 --dist=loadfile --no-loadscope-reorder --durations=60 --durations-min=4 -m "not cluster" --quick

test-cluster: $(TEST)
	$(BIN)/python -m pytest -n 2 --dist=loadfile --durations=40 --durations-min=4 -m cluster --quick

test-all: $(TEST)
	$(BIN)/python -m pytest -n 2 --dist=loadfile --durations=60 --durations-min=4

errors: $(TEST)
	$(BIN)/python -m pytest --write-docs tests/test_errors.py

# Kills processes at random moments, at least 60 times, for up to 20 minutes.
faults: $(TEST)
	$(BIN)/python -m benchmarks.faults

# Trains programs made at random with Keras and under every strategy, for up to 30 minutes.
random-programs: $(TEST)
	$(BIN)/python -m benchmarks.random_programs

# Runs the tests of the installed Keras as tfdist.run runs a script.
keras-tests: $(TEST)
	$(BIN)/python -m benchmarks.keras_tests

# Compares with Keras, with PyTorch, and between two hosts: some 90 minutes with no other work. PYTORCH is a Python that
# has PyTorch; the hosts are network namespaces, which need root.
compare: $(TEST)
	$(BIN)/python -m benchmarks.users_models
	$(BIN)/python -m benchmarks.against_pytorch --python=$(PYTORCH)
	$(BIN)/python -m benchmarks.two_hosts --rate=1 --python=$(PYTORCH)
	$(BIN)/python -m benchmarks.two_hosts --rate=0.2 --python=$(PYTORCH)

# A virtual environment of 2 GB for each pair of TensorFlow and Keras; needs python3.11, python3.12 and python3.13.
test-versions: $(TEST)
	$(BIN)/python -m benchmarks.versions --write-docs

# Colab's versions alone, without what takes long; left out in one line where python3.13 is missing.
test-colab:
	$(PYTHON) -m benchmarks.versions --pairs=colab --quick

# Installs Google's client library, which takes 190 MB.
test-vertex: $(TEST)
	$(INSTALL) -e .[dev,vertex-test]
	$(BIN)/python -m pytest tests/jobs/test_vertex.py

# Fails on a broken reference, an undocumented public name or any other warning.
docs: $(TEST) $(DOCS)
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs build/docs

# Checks over the network that the links to other sites still work.
docs-links: $(TEST) $(DOCS)
	$(BIN)/python -m sphinx -q -b linkcheck docs build/docs-links

lint: $(TEST)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(TEST)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The second finds names of Python's library that macOS does not have.
types: $(TEST)
	$(BIN)/mypy
	$(BIN)/mypy --platform=darwin

check: lint types docs test test-cluster test-colab

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
