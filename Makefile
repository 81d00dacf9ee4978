# `make demo` and `make test` work on a fresh clone: they make .venv when it is missing or out of date.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DATA ?= data
RUNS ?= runs

RUN := $(BIN)/python benchmarks/run.py --data.root $(DATA)

.PHONY: help install demo pretraining picture claims speed gpu docs notebooks test test-all test-release lint format clean

help:
	@echo "make demo          train with and without HORDE on built-in data; ends with a report"
	@echo "make test          what every change needs; METHOD=horde: the library's tests of one method"
	@echo "make test-all      the slow tests: real launches, many kills, every recipe, compilation"
	@echo "make test-release  the packages in fresh environments, the report in Chromium"
	@echo "make lint          ruff and mypy; make format mends what ruff can"
	@echo "make docs          the site of all pages, in site/index.html"
	@echo "make picture       docs/assets/neighbours.png: a search among drawn products"
	@echo "make notebooks     the outputs that the notebooks keep"
	@echo "make speed         the tables of docs/speed.md"
	@echo "make gpu           what needs a GPU, measured into docs/gpu.md; BUNDLE=DIR: without a network"
	@echo "make gpu-study BUNDLE=DIR: the study of whole trunks on its photographs"
	@echo "make claims, make pretraining: the published results on Glyphs, from the start"
	@echo "make upstream-release PML=DIR: the requests to PML against its own tests"
	@echo "make install       .venv with exact versions; all of the above make it where it is missing"

install: $(VENV)/installed

$(VENV)/installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Python 3.11 or newer is needed, $(PYTHON) is older; run: make PYTHON=/path/to/python3.11"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info >= (3, 15))' \
		|| echo "warning: $(PYTHON) is newer than Python 3.14, the newest that the pinned versions are chosen for"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --constraint constraints.txt \
		--editable '.[benchmarks,search,docs,dev,test]'
	touch $@

$(VENV)/cluster: $(VENV)/installed
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --constraint constraints.txt \
		--editable '.[cluster]'
	touch $@

# A pretrained trunk fine-tuned by the metric loss alone and with HORDE, two seeds of each, two at a time; tested on
# classes that it has not seen. Goes on where it was stopped; `rm -r runs/demo` starts it anew.
demo: install
	@echo "Four trainings of 800 steps, two at a time: some minutes on two cores."
	$(BIN)/python -m benchmarks.study demo --runs $(RUNS)/demo -- --data.root $(DATA)

# The trunks in benchmarks/backbones/glyphs, each from its seed; to be copied there with a new SHA256SUMS.
pretraining: install
	for seed in 0 1; do \
		OMP_NUM_THREADS=1 $(RUN) --recipe glyphs/pretraining/softmax --seed $$seed \
			--output $(RUNS)/pretraining/seed$$seed --resume && \
		$(BIN)/python -m benchmarks.export $(RUNS)/pretraining/seed$$seed \
			--output $(RUNS)/pretraining/seed$$seed-timm || exit 1; \
	done

# docs/assets/neighbours.png: a search among drawn products by a network that was trained on others; needs Chromium.
PRODUCTS := $(RUNS)/products
picture: install
	$(BIN)/python tools/products.py $(PRODUCTS)/seen --classes 120
	$(BIN)/python tools/products.py $(PRODUCTS)/shop --classes 24 --seed 1
	$(BIN)/python tools/products.py $(PRODUCTS)/others --classes 18 --images 1 --seed 2
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/run.py --recipe glyphs/demo/binomial \
		--data.dataset folder --data.root $(PRODUCTS)/seen --data.image_size 64 --data.train_classes null \
		--optimization.steps 500 --optimization.learning_rate 1e-3 --evaluation.verification true --output $(PRODUCTS)/run
	$(BIN)/python -m benchmarks.export $(PRODUCTS)/run --output $(PRODUCTS)/network
	$(BIN)/python examples/search_folder.py $(PRODUCTS)/network $(PRODUCTS)/shop $(PRODUCTS)/shop/teapot-03/03.jpg \
		$(PRODUCTS)/others/mug-01/01.jpg --html $(PRODUCTS)/neighbours.html
	chromium --headless --no-sandbox --disable-gpu --hide-scrollbars --window-size=640,995 \
		--screenshot=docs/assets/neighbours.png file://$(abspath $(PRODUCTS))/neighbours.html

# The page docs/claims.md and its figures: some ten core-hours, two runs at a time; goes on where it was stopped.
claims: install
	$(BIN)/python -m benchmarks.study glyphs --data.root $(DATA) --output docs/claims.md

# Prints the tables of docs/speed.md.
speed: install
	$(BIN)/python -m speed

# The site of README, docs/ and the docstrings, in site/: open site/index.html, with or without a network. With
# REPOSITORY=https://... its header links there.
docs: install
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# The outputs that the notebooks in examples/ keep.
notebooks: install
	OMP_NUM_THREADS=1 $(BIN)/jupyter execute --inplace examples/*.ipynb

# A process per core, each of one thread; the slowest tests are named at the end. What pytest compiles is kept, whatever
# the environment says: without it each process takes five seconds longer to start.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses auto --dist loadfile --durations 20

# What every change needs: a few minutes on two idle cores. METHOD=horde: the library's tests of one method.
test: install
	$(PYTEST) -m 'not slow and not release' $(if $(METHOD),tests/library -k '$(METHOD)')

# The rest: real launches, many kills, every recipe, compilation, a cluster of Ray; fifteen minutes more.
test-all: $(VENV)/cluster
	$(PYTEST) -m 'slow and not release' --kills 20

# Before a release: the packages in fresh environments, of each Python from 3.11 on that is found, which downloads torch
# for each; the report in Chromium; a cluster of Ray that loses nodes.
test-release: $(VENV)/cluster
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m release

# What upstream/ offers to PML, in a tree of its release with the tests of a clone: its whole suite after each step.
PML ?= ../pytorch-metric-learning

.PHONY: upstream-release
upstream-release: install
	OMP_NUM_THREADS=1 $(BIN)/python tools/upstream_check.py $(PML)

# The page docs/gpu.md, where there is a GPU; goes on where it was stopped. A PYTHON that is given is taken as it is;
# BUNDLE=DIR: with what tools/offline_bundle.py has put there.
GPU_PYTHON := $(if $(filter command,$(origin PYTHON)),$(PYTHON),$(BIN)/python)
OPENED := $(abspath $(RUNS))/bundle

.PHONY: gpu
ifdef BUNDLE
gpu: export PYTHONPATH := $(OPENED)/site$(if $(PYTHONPATH),:$(PYTHONPATH))
endif
gpu: $(if $(filter command,$(origin PYTHON)),,install)
	@$(if $(BUNDLE),$(GPU_PYTHON) tools/offline_bundle.py open $(BUNDLE) $(OPENED))
	$(GPU_PYTHON) -m speed --device cuda --page docs/gpu.md

# Whole trunks on the bundle's photographs, JOBS runs side by side; goes on where it was stopped.
JOBS ?= 8
BIRDS := $(OPENED)/photographs/birds

.PHONY: gpu-study
gpu-study: export PYTHONPATH := $(OPENED)/site$(if $(PYTHONPATH),:$(PYTHONPATH))
gpu-study:
	@test -n "$(BUNDLE)" || { echo "name a bundle: make gpu-study PYTHON=python3 BUNDLE=DIR"; exit 1; }
	@$(GPU_PYTHON) tools/offline_bundle.py open $(BUNDLE) $(OPENED)
	$(GPU_PYTHON) -m benchmarks.study photographs/birds_whole --data.root $(BIRDS) --jobs $(JOBS) \
		--runs $(RUNS)/studies/birds_whole --output $(RUNS)/birds_whole.md -- \
		--data.test_classes $(BIRDS)_test_classes.txt --model.trunk_args '{}' \
		--model.weights $(OPENED)/weights/tf_efficientnet_lite0.safetensors

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
