# Verbs only. Everything runs in .venv, which is made from pyproject.toml and constraints.txt.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
# pip with a line of progress: its name for people, then what follows `pip install`
PIP    := $(BIN)/python deployments/install.py
PINNED := --constraint constraints.txt

.PHONY: train test test-long test-docker test-cluster check serve stop ui golden bench bench-dataset bench-training bench-checkpoint bench-pipeline clean

train: $(VENV)/.installed ## the whole pipeline on this machine, on real text
	$(BIN)/train-litgpt run deployments/configs/local.yaml

test: $(VENV)/.installed-dev ## the test suite
	$(BIN)/pytest

test-long: $(VENV)/.installed-dev ## what takes too long for every change: whole pipelines on the platforms' stand-ins
	$(BIN)/pytest -m long

test-docker: $(VENV)/.installed-dev ## real image builds; needs a Docker engine and docker-registry
	$(BIN)/pytest -m docker

test-cluster: $(VENV)/.installed-dev ## on a real Kubernetes, the one of KUBECONFIG; docs/gke.md says what it needs
	@test -n "$$KUBECONFIG" || { echo "KUBECONFIG is not set: docs/gke.md says which cluster these tests need"; exit 1; }
	$(BIN)/pytest -m cluster

check: $(VENV)/.installed-dev ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

serve: $(VENV)/.installed ## Prefect's server with its UI, a work pool, a worker and the deployments
	$(BIN)/python -m deployments.bootstrap serve

stop: $(VENV)/.installed ## what serve started
	$(BIN)/python -m deployments.bootstrap stop

ui: serve ## the same, and open the browser
	$(BIN)/python -m webbrowser http://127.0.0.1:4200/v2

golden: $(VENV)/.installed-dev ## write down anew what is sent to the platforms; review the diff
	UPDATE_GOLDEN=1 $(BIN)/pytest -k golden

bench: bench-dataset bench-training bench-checkpoint bench-pipeline ## all measurements

bench-dataset: $(VENV)/.installed-bench ## preparation beside gigatoken, LitGPT's own, and into a bucket
	$(BIN)/python -m bench.dataset

bench-training: $(VENV)/.installed ## training steps beside litgpt pretrain's, and on two nodes
	$(BIN)/python -m bench.training

bench-checkpoint: $(VENV)/.installed ## what a save costs a training, and how fast checkpoints are written and read
	$(BIN)/python -m bench.checkpoint

bench-pipeline: $(VENV)/.installed ## what the pipeline adds to a bare torchrun
	$(BIN)/python -m bench.pipeline

clean: ## everything that can be made again; runs and datasets under output/ are kept
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +

$(VENV)/.installed: pyproject.toml constraints.txt
	@echo "installing into $(VENV) (2 minutes, once)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "$(PYTHON) is older than 3.11; make train PYTHON=python3.11"; exit 1; }
	@$(PYTHON) -m venv $(VENV)
	@echo "✓ $(VENV)"
	@# torch first: what depends on it must find this very version, not fetch a newer one
	@$(PIP) torch $(PINNED) torch
	@$(PIP) "litgpt, prefect and what else is needed" $(PINNED) --editable .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@$(PIP) "for the tests" $(PINNED) --editable '.[dev]'
	@touch $@

$(VENV)/.installed-bench: $(VENV)/.installed-dev
	@$(PIP) "for the measurements" $(PINNED) --editable '.[bench]'
	@# litdata asks for torchvision, which it can do without and whose builds are for CUDA
	@$(PIP) litdata $(PINNED) --no-deps litdata
	@touch $@
