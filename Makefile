# Every command a person or CI needs. `make help` lists them.
SHELL := /bin/bash
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
RUNTIME := $(VENV)/.runtime
PROGRAM := $(VENV)/.program
# What is compiled when it is first imported need not be compiled now: that is half of the time.
INSTALL := $(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check
STAMP := $(VENV)/.installed
SITE_VENV := build/site-venv
PROGRAMS := $(VENV)/.debian-programs
CLUSTER := $(PYTHON) hack/cluster/cluster.py
# Only people's commands use it, and it is large.
NOT_IN_IMAGE := cel-expr-python
# Under which the image may be handed on. MPL-2.0 asks for the source of changed files; none is changed.
LICENCES := Apache;BSD;ISC;MIT;MPL-2.0;Mozilla Public License 2.0;PSF-2.0;Python Software Foundation;0BSD;Unlicense
ARGS ?=
# Many images set it; then every process compiles the driver anew.
unexport PYTHONDONTWRITEBYTECODE
MACHINE ?= dgx-h100

.DEFAULT_GOAL := help
.PHONY: audit coverage fuzz gpu-check golden help setup demo playground docs site serve test check fix bench soak scale cluster cluster-down cluster-status image e2e e2e-matrix e2e-vm lock manifests node-bundle proto clean release

help: ## Show this list
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9-]+):.*## /  \1\t/' | expand -t 20

setup: $(STAMP) ## Create the environment from the locked dependencies

$(RUNTIME): requirements.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or newer is needed; $(PYTHON) is $$($(PYTHON) -V). Set PYTHON=python3.x"; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || \
		{ echo "The venv module is missing: install python3-venv"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing the locked dependencies (once; minutes on a slow machine)"
	@$(INSTALL) --no-deps --require-hashes -r requirements.txt
	@touch $@

# The commands of this tree in $(BIN), made by the locked setuptools.
$(PROGRAM): $(RUNTIME) requirements-dev.txt pyproject.toml
	@sed -n '/^setuptools==/,/[^\\]$$/p' requirements-dev.txt > $@.txt
	@$(INSTALL) --require-hashes -r $@.txt
	@PYTHONWARNINGS='ignore:Editable installation' $(INSTALL) --no-deps --no-build-isolation --editable .
	@rm $@.txt && touch $@

# --no-deps: the lock is complete, and pip 23 stops at a package that is locked and also wanted with an extra, once a newer
# version of it is released.
$(STAMP): $(PROGRAM) requirements-dev.txt
	@echo "Installing the locked tools for development (once; minutes on a slow machine)"
	@$(INSTALL) --no-deps --require-hashes -r requirements-dev.txt
	@touch $@

demo: $(RUNTIME) ## A simulated machine from slices to a prepared claim, without cluster, GPU or root; MACHINE=dgx-h100
	@$(BIN)/python hack/playground demo --simulate "$(MACHINE)"

playground: $(PROGRAM) ## The plugin on a simulated machine, with an API server for kubectl, until Ctrl-C; MACHINE=dgx-h100 CONFIG=FILE
	@$(BIN)/python hack/playground run --simulate "$(MACHINE)" $(if $(CONFIG),--config "$(CONFIG)")

golden: proto manifests docs ## Write everything that is generated: golden files, tables of the manual, manifests, docs; then read the diff
	@$(BIN)/python -m pytest -q --update-golden -m "not cluster"

docs: $(STAMP) ## Write docs/commands.md and docs/pictures with what the commands print now; a test compares them
	@$(BIN)/python hack/record/commands_page.py

$(SITE_VENV)/.installed: requirements-site.txt
	@rm -rf $(SITE_VENV) && $(PYTHON) -m venv $(SITE_VENV)
	@echo "Installing what makes the site (once)"
	@$(SITE_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes \
		-r requirements-site.txt
	@touch $@

site: $(SITE_VENV)/.installed ## The manuals as a web site in build/site, which loads nothing from elsewhere
	@$(SITE_VENV)/bin/python hack/site/make_site.py

serve: site ## The same, served on http://127.0.0.1:8000, where the search works
	@$(PYTHON) -m http.server 8000 --bind 127.0.0.1 --directory build/site

# Where it fails it says why, and so do the tests that need it; the others run.
$(PROGRAMS): hack/debian_programs.py $(RUNTIME)
	@$(PYTHON) hack/debian_programs.py && touch $@ || true

# In a new checkout each worker would compile all tests.
tests/__pycache__: $(STAMP)
	@$(BIN)/python -m pytest -q --collect-only >/dev/null || true

test: $(STAMP) $(PROGRAMS) | tests/__pycache__ ## All tests that need neither root nor a cluster
	@$(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder --durations=10 -m "not cluster" $(ARGS)

coverage: $(STAMP) ## The same with the lines that no test runs; half as long again
	@$(MAKE) --no-print-directory test ARGS="--cov=dra_driver --cov-report=term-missing:skip-covered $(ARGS)"

check: $(STAMP) ## Format, lint, types, layers, generated code
	@$(BIN)/ruff format --check --quiet . || { echo "run 'make fix'"; exit 1; }
	@$(BIN)/ruff check --quiet .
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(BIN)/python hack/proto/generate.py --check
	@$(BIN)/python hack/manifests.py --check >/dev/null || { echo "run 'make golden'"; exit 1; }

fix: $(STAMP) ## Format, and fix what can be fixed
	@$(BIN)/ruff check --fix --quiet . ; $(BIN)/ruff format --quiet .

bench: $(STAMP) ## Measure the budgets of docs/decisions.md and print them as a table
	@$(BIN)/python hack/bench $(ARGS)

soak: $(STAMP) ## A week of churn in five minutes on a simulated node, and what is left of it
	@$(BIN)/python hack/bench soak $(ARGS)

scale: $(STAMP) ## What the publishers of 1,000 nodes cost the API server; ARGS="--kubeconfig FILE" for a real one
	@$(BIN)/python hack/bench scale $(ARGS)

audit: $(STAMP) ## List the locked dependencies, and fail at a licence that the image may not contain
	@$(BIN)/pip-licenses --partial-match --allow-only="$(LICENCES)" --packages $$(sed -n 's/==.*//p' requirements.txt)

fuzz: $(STAMP) ## Every parser of bytes from outside with 1,000 inputs; ARGS="-k claim" for some of them
	@HYPOTHESIS_PROFILE=explore $(BIN)/python -m pytest -n auto tests/security $(ARGS)

gpu-check: $(STAMP) ## On a machine with a real GPU: compare what would be published with nvidia-smi; reads only
	@hack/gpu-check $(ARGS)

image: ## Build daemonset/Dockerfile by buildah, without a registry, and print the path of the archive (root, Debian)
	@$(PYTHON) hack/image.py

release: $(STAMP) ## All of a version into dist/, and the image for this architecture where docker or buildah can: VERSION=0.2.0; IMAGE=registry/name for the manifests; SOURCE=URL for the label
	@$(BIN)/python hack/release.py $(if $(IMAGE),--image $(IMAGE)) $(if $(SOURCE),--source $(SOURCE)) "$(VERSION)"
	@for tool in docker buildah; do command -v $$tool >/dev/null && \
		$$tool build --quiet --file daemonset/Dockerfile --tag "$(or $(IMAGE),gpu-dra-driver):$(VERSION)" . && break; done || \
		echo "release: no image: neither docker nor buildah could build it here"

cluster: image ## A real Kubernetes on this machine with the driver installed (root)
	@$(CLUSTER) up
	@$(PYTHON) hack/cluster/install.py

cluster-status: ## What of the cluster runs
	@$(CLUSTER) status

cluster-down: ## Stop the cluster and remove what it left
	@$(CLUSTER) down

node-bundle: ## One archive that makes a machine with a GPU a Kubernetes node for some minutes, without a network (root)
	@$(PYTHON) hack/gpunode/bundle.py $(ARGS)

e2e: $(STAMP) $(PROGRAMS) ## Tests on a real Kubernetes, unattended; cleans up (root)
	@$(BIN)/python hack/e2e.py $(ARGS)

e2e-matrix: $(STAMP) $(PROGRAMS) ## The core of these tests on Kubernetes 1.34 to 1.37 as they are by default (root)
	@$(BIN)/python hack/e2e.py --matrix $(ARGS)

e2e-vm: $(STAMP) ## The daemon on a real kernel with an IOMMU, in QEMU without KVM; nothing is installed
	@$(BIN)/python hack/e2e_vm.py $(ARGS)

manifests: $(STAMP) ## Write what follows from the chart and from the fields of parameters: daemonset, schema, table of values
	@$(BIN)/python hack/manifests.py $(ARGS)

proto: $(STAMP) ## Generate the gRPC code from proto/
	@$(BIN)/python hack/proto/generate.py

COMPILE := $(BIN)/pip-compile --quiet --generate-hashes --no-emit-index-url --no-emit-find-links \
	--no-emit-trusted-host --strip-extras --no-header --allow-unsafe --no-annotate

TOML := import tomllib; found = tomllib.load(open("pyproject.toml", "rb"));

lock: ## Lock the dependencies again
	@$(COMPILE) -o requirements.txt pyproject.toml
	@$(COMPILE) --extra dev -c requirements.txt -o requirements-dev.txt pyproject.toml
	@$(BIN)/python -c '$(TOML) print(*(one for one in found["project"]["dependencies"] if not one.startswith("$(NOT_IN_IMAGE)")), sep="\n")' | \
		$(COMPILE) -c requirements.txt -o requirements-image.txt -
	@$(BIN)/python -c '$(TOML) print(*found["dependency-groups"]["site"], sep="\n")' | \
		$(COMPILE) -o requirements-site.txt -

clean: ## Remove the environment and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .coverage
