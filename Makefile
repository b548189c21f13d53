# What CI runs and what a person types. `make help` lists it.
PYTHON ?= python3
VENV   ?= .venv
BIN     = $(VENV)/bin
# Tests of one group (pytest.mark.xdist_group) share a federation, so they run in one worker. There
# is a worker more than cores, because tests with real processes wait for these half of the time.
WORKERS = -n 3 --dist loadgroup --no-loadscope-reorder
VERSION  := $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
REVISION := $(shell git describe --always --dirty --abbrev=40 2>/dev/null || echo unknown)
# Tests start hundreds of processes, each of which would compile every module.
unexport PYTHONDONTWRITEBYTECODE
SILENT_PIP = --quiet --disable-pip-version-check

.DEFAULT_GOAL := help
.PHONY: help setup setup-dev demo docs test check config fast e2e nightly mutations images pins e2e-docker chaos bench-overhead bench-partition bench-auto \
        bench-bounds bench-trees bench-digits bench-hcct bench-fedgroup bench-fedcollab bench-baselines bench-durability \
        bench-fedgenp bench-formats bench-life bench-large-tables bench-natural bench-newcomers bench-poison bench-privacy bench-report bench-scale bench-secure bench-tables clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "coterie needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) -V). Try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@echo "Making a virtual environment in $(VENV)"
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml | $(BIN)/python
	@echo "Installing coterie (PyTorch is a large download: some minutes the first time)"
	@$(BIN)/python -m pip install $(SILENT_PIP) --editable .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml | $(BIN)/python
	@echo "Installing coterie and its development tools (some minutes the first time)"
	@$(BIN)/python -m pip install $(SILENT_PIP) --editable '.[dev]'
	@touch $@ $(VENV)/.installed

# Flower's own apps, which tests run. They are skipped where this wheel cannot be downloaded.
$(VENV)/.installed-apps: tests/apps/flower.txt | $(BIN)/python
	@$(BIN)/python -m pip download $(SILENT_PIP) --retries 1 --timeout 15 --no-deps --require-hashes --dest $(VENV)/flower --requirement $< && touch $@ || \
	  echo "The wheel of Flower's apps could not be downloaded: the tests that run them are skipped. The next make tries again."

# mypy reads a package from a folder of its name.
.links/coterie/__init__.py:
	@mkdir -p $(@D)
	@for part in client engine features pictures server strategies system tasks wire; do ln -sfn ../../$$part $(@D)/$$part; done
	@ln -sfn ../../api/__init__.py $@

setup: $(VENV)/.installed ## Make the virtual environment and install

setup-dev: $(VENV)/.installed-dev $(VENV)/.installed-apps ## The same with the development tools

demo: setup ## Ten silos on this machine find out who should train with whom
	@$(BIN)/coterie demo $(ARGS)

test: setup-dev ## Fast tests and tests with real processes, side by side
	@$(BIN)/python -m pytest -q $(WORKERS) -m "not nightly" $(ARGS)

fast: setup-dev ## Fast tests alone
	@$(BIN)/python -m pytest -q $(WORKERS) -m "not e2e and not nightly" $(ARGS)

docs: setup-dev .links/coterie/__init__.py ## The documentation as a site in site/
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --strict
	@echo "Open site/index.html, or with its search: $(BIN)/python -m http.server --directory site"

check: setup-dev .links/coterie/__init__.py ## Linter and types
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

config: setup ## Write what is made from the options: defaults in pyproject.toml, tables of keys
	@$(BIN)/python docs/generate.py

e2e: setup-dev ## Tests with real processes and real gRPC
	@$(BIN)/python -m pytest -q $(WORKERS) -m "e2e and not nightly" $(ARGS)

nightly: setup-dev .links/coterie/__init__.py ## The long forms of the tests: every baseline and demo, 60 kills, 5,000 fuzz cases …
	@$(BIN)/python -m pip install $(SILENT_PIP) --editable '.[dev,deploy]'
	@$(BIN)/python -m pytest -q $(WORKERS) -m nightly $(ARGS)
	@$(BIN)/python -m tests.mutations
	@if docker info >/dev/null 2>&1; then $(MAKE) e2e-docker; \
	  else echo "No Docker engine answers here: the containers are not tested."; fi

mutations: setup-dev ## Twenty deliberate defects, and which of them the tests find
	@$(BIN)/python -m tests.mutations $(ARGS)

chaos: setup-dev ## Sixty random kills of silos, ServerApp and SuperLink; the models must not notice
	@$(BIN)/python -m pytest -s -m nightly tests/e2e/test_chaos.py $(ARGS)

bench-durability: setup ## Rounds with and without the SuperLink's database, and a checkpoint
	@$(BIN)/python -m benchmarks.engine.durability $(ARGS)

images: ## Images of coordinator and silo, and in build/ what is in them; COTERIE_BASE=IMAGE names the base
	@mkdir -p build
	@for part in coordinator silo; do \
	  docker build --file docker/Dockerfile --target $$part --tag coterie-$$part:$(VERSION) \
	    --build-arg VERSION=$(VERSION) --build-arg REVISION=$(REVISION) \
	    $(if $(COTERIE_BASE),--build-arg BASE=$(COTERIE_BASE)) \
	    $(if $(COTERIE_TORCH_INDEX),--build-arg TORCH_INDEX=$(COTERIE_TORCH_INDEX)) . || exit 1; \
	  docker run --rm --entrypoint cat coterie-$$part:$(VERSION) /opt/coterie/sbom.cdx.json \
	    > build/coterie-$$part.cdx.json || exit 1; \
	done
	@docker images --filter reference='coterie-*:$(VERSION)'

pins: setup ## Which release of every package goes into the images, with hashes: docker/requirements*.txt
	@$(BIN)/python docker/pins.py

e2e-docker: setup-dev ## The compose federation on a Docker engine; COTERIE_BASE=IMAGE names the base
	@$(BIN)/python -m pytest -m docker tests/containers -s $(ARGS)

bench-overhead: setup ## Round overhead: stock SuperNodes beside resident silos, same run
	@$(BIN)/python -m benchmarks.engine.overhead $(ARGS)

bench-partition: setup ## Gram matrix and solvers beside their limits
	@$(BIN)/python -m benchmarks.engine.partition $(ARGS)

bench-auto: setup ## Auto beside every strategy, on other silos than these were tuned on
	@$(BIN)/python -m benchmarks.papers.auto $(ARGS)

bench-newcomers: setup ## Silos without labels: make bench-newcomers ARGS='--data FOLDER'
	@$(BIN)/python -m benchmarks.papers.newcomers $(ARGS)

bench-natural: setup ## Strategies and regressions on real organisations' tables: make bench-natural ARGS='--data FOLDER'
	@$(BIN)/python -m benchmarks.natural $(ARGS)

bench-digits: setup ## HCCT's and FedGroup's options on the demo's silos, ten seeds
	@$(BIN)/python -m benchmarks.papers.hcct.digits $(ARGS)
	@$(BIN)/python -m benchmarks.papers.hcct.scaled
	@$(BIN)/python -m benchmarks.papers.fedgroup.digits $(ARGS)

bench-trees: setup ## Boosted trees in groups: beside all rows together, alone, and over all silos
	@$(BIN)/python -m benchmarks.engine.trees $(ARGS)

bench-scale: setup ## 100, 300, 1,000 virtual silos over gRPC: make bench-scale ARGS='--data FOLDER'
	@$(BIN)/python -m benchmarks.engine.scale $(ARGS)

bench-hcct: setup ## HCCT's tables on real data: make bench-hcct ARGS='--data FOLDER'
	@$(BIN)/python -m benchmarks.papers.hcct.figures
	@$(BIN)/python -m benchmarks.papers.hcct $(ARGS)

bench-fedgenp: setup ## FedGenP beside its baselines: make bench-fedgenp ARGS='--data FOLDER'
	@$(BIN)/python -m benchmarks.engine.generators
	@$(BIN)/python -m benchmarks.papers.fedgenp.figure
	@$(BIN)/python -m benchmarks.papers.fedgenp.fooling
	@$(BIN)/python -m benchmarks.papers.fedgenp $(ARGS)

bench-fedgroup: setup ## FedGroup's Tables I and III, Figs. 1 and 3 to 5: make bench-fedgroup ARGS='--data FOLDER'
	@$(BIN)/python -m benchmarks.papers.fedgroup $(ARGS)
	@$(BIN)/python -m benchmarks.papers.fedgroup.measures $(ARGS)
	@$(BIN)/python -m benchmarks.papers.fedgroup.groups $(ARGS)
	@$(BIN)/python -m benchmarks.papers.fedgroup.discrepancy $(ARGS)

bench-fedcollab: setup ## FedCollab's tables on real data: make bench-fedcollab ARGS='--data FOLDER'
	@$(BIN)/python -m benchmarks.papers.fedcollab $(ARGS)

bench-baselines: setup ## The papers' baselines: make bench-baselines ARGS='--data FOLDER'
	@$(BIN)/python -m benchmarks.papers.baselines $(ARGS)
	@$(BIN)/python -m benchmarks.papers.hcct --parts digit --seeds 1 \
	    --only "Independent;Global;HCCT;MAXFL;FedFA;IFCA;FLSC" $(ARGS)

bench-large-tables: setup ## Processor time and memory to load a table of 1,000,000 rows
	@$(BIN)/python -m benchmarks.engine.tables $(ARGS)

bench-report: setup ## Time and size of reports, up to 200 silos and 500 rounds
	@$(BIN)/python -m benchmarks.engine.report $(ARGS)

bench-secure: setup ## Secure runs beside plain ones: groups, errors, seconds and bytes of a round
	@$(BIN)/python -m benchmarks.engine.secure $(ARGS)

bench-life: setup ## Silos that only test, what a silo brings, drift: ten seeds each
	@$(BIN)/python -m benchmarks.engine.life $(ARGS)

bench-formats: setup ## Updates in 16 and 8 bits beside float32: groups, errors, bytes of a round
	@$(BIN)/python -m benchmarks.engine.formats $(ARGS)

bench-poison: setup ## One dishonest silo; in minutes: make bench-poison ARGS='--seeds 1 --strategies fedavg,hcct,auto'
	@nice -n 19 $(BIN)/python -m benchmarks.engine.backdoor $(ARGS)
	@nice -n 19 $(BIN)/python -m benchmarks.engine.poison $(ARGS)

bench-bounds: setup ## What these bounds cost without an attacker: make bench-bounds ARGS='--data FOLDER'
	@$(BIN)/python -m benchmarks.engine.bounds $(ARGS)

bench-privacy: setup ## Training images out of updates, sums and sketches; who was trained on, out of models
	@$(BIN)/python -m benchmarks.privacy.inversion $(ARGS)
	@$(BIN)/python -m benchmarks.privacy.projection
	@$(BIN)/python -m benchmarks.privacy.membership
	@$(BIN)/python -m benchmarks.privacy.histograms

bench-tables: setup ## Every table of benchmarks/results anew from the stored figures
	@$(BIN)/python -m benchmarks.kit

clean: ## Remove the virtual environment and caches
	rm -rf $(VENV) .links site build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
