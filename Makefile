# Verbs only. Everything runs in .venv, which is made from pyproject.toml and constraints.txt.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
EXTRA   =
# Where make docs leaves its pages.
SITE   ?= site
# What make test leaves out, by topic: a folder each of tests/real.
REAL   := $(notdir $(patsubst %/,%,$(wildcard tests/real/*/)))
# Python compiles what is imported when it is; compiling all that is installed takes a minute.
PIP    := $(BIN)/python -m pip install --disable-pip-version-check --no-input --no-compile --quiet \
          --constraint constraints.txt
# That bytecode is kept: each process of a run would compile it anew if none may write it.
export PYTHONDONTWRITEBYTECODE :=
# Prefect's client would tell its makers of its first import.
export DO_NOT_TRACK := 1
# Of Prefect's server. The environment's own PORT is meant for others.
PORT   = 4200

.PHONY: help train test test-real $(REAL:%=test-%) test-flaky ci quick check audit serve stop deploy ui golden lock size mutants bench bench-dataset bench-training bench-model bench-checkpoint bench-pipeline bench-commands bench-diagnosis diagrams docs clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "%-22s %s\n", "make " $$1, $$2}' $(firstword $(MAKEFILE_LIST))

train: $(VENV)/.installed ## the whole pipeline on this machine, on real text
	$(BIN)/train-litgpt run deployments/configs/local.yaml

test: $(VENV)/.installed-dev ## the tests of every change, five minutes on two cores
	$(BIN)/pytest

test-real: $(REAL:%=test-%) ## everything real that this machine can test; or one topic, as make test-server: the folders of tests/real

test-docs: $(VENV)/.installed-docs

$(REAL:%=test-%): test-%: $(VENV)/.installed-dev
	$(BIN)/python tests/real/status.py $*

test-flaky: $(VENV)/.installed-dev ## make test ten times in a row, five of them in parallel to six busy loops
	$(BIN)/python tests/flaky.py

ci: $(VENV)/.installed-dev ## .ci/run in a fresh clone of the last commit, with times and sizes: run it before you call anything done
	@$(BIN)/python tests/ci.py

quick: $(VENV)/.installed-dev ## before each commit, in seconds: generated pages, style, and the rules of pages and names
	$(BIN)/python -m docs.reference
	$(BIN)/ruff format --quiet .
	$(BIN)/ruff check --quiet .
	$(BIN)/pytest -n 0 tests/test_rules.py tests/test_architecture.py tests/test_documents.py tests/test_language.py

check: $(VENV)/.installed-dev ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

audit: $(VENV)/.installed-dev ## bandit's rules on the source, and known vulnerabilities of the pinned packages, the images' too
	$(BIN)/ruff check .
	@$(BIN)/python tests/audit.py constraints.txt $(wildcard litgpt_demo/stacks/*.lock)

serve: $(VENV)/.installed ## Prefect's server with its UI, a work pool, a worker and the deployments; PORT=4300 for another port
	$(BIN)/train-litgpt serve --port $(PORT)

stop: $(VENV)/.installed ## end the server and the worker that serve started
	$(BIN)/train-litgpt stop

deploy: $(VENV)/.installed ## the work pool, the deployments and the automations on a team's server, that of PREFECT_API_URL
	$(BIN)/train-litgpt deploy

ui: serve ## the same, and open the browser
	@$(BIN)/python -c "import sys, webbrowser; sys.exit(not webbrowser.open(sys.argv[1]))" http://127.0.0.1:$(PORT)/v2 || \
		echo "no browser is found here: open the address above in yours, and paste the password"

golden: $(VENV)/.installed-dev ## store what is sent to the platforms; review the diff
	UPDATE_GOLDEN=1 $(BIN)/pytest -k golden

lock: $(VENV)/.installed ## the hashes of every package of each stack's image, after a change of constraints.txt or litgpt_demo/requirements.txt
	@$(PIP) uv
	$(BIN)/python -m deployments.lock $(BIN)/uv

size: $(VENV)/.installed-dev ## lines, files and other sizes of the source, next to their limits
	PYTHONPATH=tests:tests/fakes $(BIN)/python -m bench.size

mutants: $(VENV)/.installed-dev ## mistakes of one line that some test has to notice; ONLY="NAME …" for some of them
	$(BIN)/python tests/mutants.py $(ONLY)

bench: $(VENV)/.installed-bench ## all measurements in one table, within 25 minutes on two cores; QUICK=1 takes one round of each
	$(BIN)/python -m bench $(if $(QUICK),--quick)

bench-dataset: $(VENV)/.installed-bench ## preparation, compared with gigatoken and LitGPT, and into a bucket
	$(BIN)/python -m bench dataset $(if $(QUICK),--quick)

bench-training: $(VENV)/.installed ## training steps, compared with those of litgpt pretrain
	$(BIN)/python -m bench training $(if $(QUICK),--quick)

bench-model: $(VENV)/.installed ## the features of the trainer: losses and resumes of small models, and times of steps
	$(BIN)/python -m bench model $(if $(QUICK),--quick)

bench-checkpoint: $(VENV)/.installed ## what a save costs a training, and how fast checkpoints are written and read
	$(BIN)/python -m bench checkpoint $(if $(QUICK),--quick)

bench-pipeline: $(VENV)/.installed ## what the pipeline adds to a bare torchrun
	$(BIN)/python -m bench pipeline $(if $(QUICK),--quick)

bench-commands: $(VENV)/.installed ## the seconds of --help, runs and plan
	$(BIN)/python -m bench commands $(if $(QUICK),--quick)

bench-diagnosis: $(VENV)/.installed ## how often the diagnosis of a failure is right, in seconds: it reads recorded ones
	$(BIN)/python -m bench diagnosis $(if $(QUICK),--quick)

diagrams: $(VENV)/.installed-dev ## draw the Mermaid diagrams of the pages: MERMAID=mermaid.min.js, from `npm pack mermaid@11`
	$(BIN)/python -m docs.diagrams $(MERMAID)

docs: $(VENV)/.installed-docs ## the reference from the code, and the pages as a site, in site/; links are checked
	$(BIN)/python -m docs.reference
	NO_MKDOCS_2_WARNING=1 PYTHONPATH=. $(BIN)/mkdocs build --site-dir $(SITE)

clean: ## everything that can be made again; runs and datasets under output/ are kept
	rm -rf $(VENV) build site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +

# A first installation has the EXTRA of its goal at once: pip takes half a minute to look at all packages a second time.
$(VENV)/.installed: pyproject.toml constraints.txt
	@echo "installing into $(VENV) (2 minutes, once)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "$(PYTHON) is older than 3.11; make train PYTHON=python3.11"; exit 1; }
	@$(PYTHON) -m venv $(VENV)
	@rm -f $@-*
	@echo "✓ $(VENV)"
	@# Python 3.11 comes with a pip that takes a minute longer to resolve what goes together.
	@$(PIP) --upgrade pip
	@# torch first: what depends on it must find this very version, not fetch a newer one
	@$(PIP) torch
	@extras=$$(echo $(EXTRA) $(if $(shell command -v nvidia-smi),float8) | tr ' ' ,); \
		$(PIP) --editable ".$${extras:+[$$extras]}"
	@echo "compiling what every start imports (20 s, once)"
	@printf '%s\0' "import cli.foreground, flows.server, flows.train_litgpt, prefect.server.api.server, prefect.cli, uvicorn" \
		"import torch.distributed.run, matplotlib.backends.backend_svg, litgpt_demo.training.loop, litgpt_demo.export.models; \
		from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationMixin" | xargs -0 -n 1 -P 2 $(BIN)/python -c
	@touch $@ $(EXTRA:%=$@-%)

# The stamp of an extra exists only if that extra is installed beside this very .installed, whose recipe begins by removing
# all of them. The file itself is the answer: dash takes a missing file for one that is not older, and stamps written in one
# tick of the clock are equally old.
$(VENV)/.installed-dev: EXTRA = dev
$(VENV)/.installed-docs: EXTRA = docs
$(VENV)/.installed-dev $(VENV)/.installed-docs: $(VENV)/.installed-%: $(VENV)/.installed
	@test -e $@ || $(PIP) --editable '.[$*]'
	@touch $@

$(VENV)/.installed-bench: $(VENV)/.installed-dev
	@$(PIP) --editable '.[bench]'
	@# litdata asks for torchvision, which it can do without and whose builds are for CUDA
	@$(PIP) --no-deps litdata
	@touch $@
