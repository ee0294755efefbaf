# Kiln. `make` lists the targets.
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory
.SUFFIXES:
.DELETE_ON_ERROR:
.PHONY: help setup java native jars jars-s3 tools run test test-all fuzz mutants chaos hostile lint proto pages sample bench lock audit sbom wheel dist images docs clean

VENV := .venv
BIN := $(VENV)/bin
# Installs the lock file in seconds where pip takes minutes. `make lock` writes conf/uv.lock, by which pip installs uv.
UV := uv==0.13.9
PY := $(BIN)/python
KILN := $(BIN)/kiln
ARGS ?=
FOR ?= 10m

# The first of these that is a Python 3.11 to 3.13: `make setup PYTHON=…` takes another.
PYTHONS := python3 python3.13 python3.12 python3.11
PYTHON ?= $(shell for name in $(PYTHONS); do \
	"$$name" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null && echo "$$name" && break; done)

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo
	@echo '  ARGS passes options to the command of a target: make run ARGS="--for 60s"'

setup: $(VENV)/.java $(VENV)/.installed $(VENV)/.native jars ## install everything: .venv (with .venv/bin/kiln), native core, jars, and Java (on Debian as root)

java: ## check Java; on Debian as root, install it if it is missing
	@$(or $(wildcard $(PY)),$(PYTHON)) -m kiln.deploy.stack.java --install

native: $(VENV)/.installed ## build the native core; on Debian as root, install rustc first if it is missing
	@$(PY) -m kiln.deploy.stack.native_core --install && touch $(VENV)/.native

jars: $(VENV)/.installed ## fetch the jars that conf/ivy.xml pins
	@$(PY) -m kiln.deploy.stack.jars
	@test -f .jars/broker/classes.jsa || $(PY) -m kiln.deploy.stack.embedded_broker
	@test .jars/spark/classes.jsa -nt $(VENV)/.installed || $(PY) -m kiln.deploy.run.spark_classes

jars-s3: $(VENV)/.installed ## fetch Spark's jars for an object store (kiln run fetches them when needed)
	@$(PY) -m kiln.deploy.stack.jars --s3

tools: $(VENV)/.installed ## install programs that some tests need; print why one cannot be installed (ARGS=api-server: Kubernetes' API server)
	@cd tests && PYTHONPATH=$(CURDIR):$(CURDIR)/tests ../$(PY) -m kit.tools $(ARGS)

run: setup ## run Kiln: broker, demo network, queries, status screen (ARGS="--for 60s")
	@$(KILN) run $(ARGS)

# With it, each of hundreds of processes would compile Kiln's modules again, and each of pytest's all tests.
unexport PYTHONDONTWRITEBYTECODE

PYTEST := PYTHONHASHSEED=0 $(PY) -m pytest --dist loadscope

test: setup ## run the unit tests, and the main path with Spark, Kafka and third-party peers, in about five minutes (ARGS="tests/unit -k cid")
	@$(PYTEST) -n 3 -m "not slow" $(ARGS)

test-all: setup ## run every test, or every test in some folders (ARGS="tests/kafka")
	@$(PYTEST) -n 4 $(ARGS)

fuzz: setup ## fuzz decoders, router and batcher, and run property tests with new seeds; failures go to .fuzz (FOR=10m)
	@.ci/fuzz $(FOR) $(ARGS)

mutants: setup ## break Kiln at random places, one at a time, and count the breaks that `make test` notices (ARGS="--seed 1 --places 60")
	@cd tests && PYTHONPATH=$(CURDIR):$(CURDIR)/tests ../$(PY) -m mutants $(ARGS)

chaos: setup ## inject faults into a running Kiln at times that the seed determines (ARGS="--seed 1 --faults 20")
	@cd tests && PYTHONPATH=$(CURDIR):$(CURDIR)/tests ../$(PY) -m chaos $(ARGS)

hostile: setup ## run a bridge among hostile peers, and report the effect on honest ones (ARGS="flood --seconds 600", "announcements", "large")
	@cd tests && PYTHONPATH=$(CURDIR):$(CURDIR)/tests ../$(PY) -m hostile $(ARGS)

lint: $(VENV)/.installed ## check style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

proto: $(VENV)/.installed ## regenerate the protobuf code from schemas/proto/*/*.proto
	@PATH="$(CURDIR)/$(BIN):$$PATH" bash schemas/proto/generate.sh

pages: $(VENV)/.installed ## regenerate from the code: docs/TABLES.md, and the lists in docs/METRICS.md, RUNBOOK.md, SQL.md and quality.md
	@$(PY) -m kiln.schemas.delta.tables > docs/TABLES.md
	@$(PY) -m kiln.schemas.metrics docs/METRICS.md
	@$(PY) -m kiln.schemas.faults docs/RUNBOOK.md
	@$(PY) -m kiln.schemas.delta.views docs/SQL.md
	@$(PY) -m kiln.pipelines.quality.suites docs/quality.md

sample: setup ## record a new sample lake from a demo network (ARGS="--from STATE": from a state folder)
	@$(PY) -m kiln.deploy.query.sample_recording $(ARGS)

bench: setup ## measure (ARGS="--help")
	@$(PY) -m bench $(ARGS)

LOCK := $(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-header --no-annotate

lock: $(VENV)/.installed ## resolve pyproject.toml into the lock files, and write the checksums of the jars
	$(LOCK) --extra all --extra dev --override conf/overrides.txt pyproject.toml -o requirements.lock
	$(LOCK) --extra all --override conf/overrides.txt --constraint requirements.lock pyproject.toml -o conf/runtime.lock
	echo "$(UV)" | $(LOCK) - -o conf/uv.lock
	$(PY) -m kiln.deploy.stack.jars --lock
	$(PY) -m kiln.deploy.stack.jars --lock --s3

audit: $(VENV)/.installed ## check all locked packages for known vulnerabilities, over the network (ARGS="--ignore-vuln ID")
	@mkdir -p build
	@$(BIN)/pip-audit --progress-spinner off --disable-pip --require-hashes -r requirements.lock -r conf/uv.lock $(ARGS) 2>build/audit.log || \
		{ tail -n 1 build/audit.log >&2; exit 1; }
	@cat build/audit.log

BILL := PYTHONWARNINGS=ignore $(BIN)/cyclonedx-py requirements --output-reproducible --short-PURLs --pyproject pyproject.toml

sbom: $(VENV)/.installed ## write the bill of materials of conf/runtime.lock as CycloneDX (ARGS="FILE")
	@mkdir -p build && $(BILL) -o $(or $(ARGS),build/kiln.cdx.json) conf/runtime.lock

COMMIT = $(shell git describe --always --abbrev=12 --exclude '*' --dirty=.dirty)

wheel: $(VENV)/.installed ## build wheels with and without the native core, and the source distribution, in dist; the version contains the commit
	@git rev-parse --verify --quiet HEAD >/dev/null || { echo "make wheel needs git and a git checkout, because it puts the commit into the version" >&2; exit 1; }
	@rm -rf *.egg-info dist/kiln_gossip-*
	@SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) $(PY) -m build --quiet --no-isolation --outdir dist \
		-C=--global-option=egg_info -C=--global-option=--tag-build=+g$(COMMIT)
	@rm -rf *.egg-info
	@$(PY) -m kiln.deploy.stack.native_core --wheel dist/kiln_gossip-*-any.whl

# What a part of Kiln needs of conf/runtime.lock, with its versions and checksums. Executors have a Spark of their own.
build/bridge.lock: PART := --extra bridge --no-emit-package deltalake --no-emit-package duckdb
build/jobs.lock: PART := --extra bridge --extra quality --extra spark
build/executors.lock: PART := --extra spark --no-emit-package duckdb
build/%.lock: conf/runtime.lock pyproject.toml | $(VENV)/.installed
	@mkdir -p build && cp conf/runtime.lock $@
	@$(LOCK) $(PART) --override conf/overrides.txt pyproject.toml -o $@

build/%.cdx.json: build/%.lock
	@$(BILL) -o $@ $<

dist: wheel jars build/executors.lock ## build a release in dist: wheel, locked requirements, environment for executors, jars, jobs
	@rm -rf dist/jars dist/jobs build/environment && mkdir dist/jars dist/jobs
	@cp conf/runtime.lock dist/requirements.txt
	@cp pipelines/jobs/[a-z]*.py dist/jobs
	@cp .jars/spark/*.jar dist/jars && sed -n 's|  spark/|  jars/|p' conf/jars.sha256 >dist/jars.txt
	@$(BIN)/uv venv --quiet --python $(PY) build/environment
	@$(BIN)/uv pip install --quiet --python build/environment --no-deps --require-hashes -r build/executors.lock
	@$(BIN)/uv pip install --quiet --python build/environment --no-deps --no-index --find-links dist kiln-gossip
	@$(BIN)/venv-pack --quiet --force --prefix build/environment --output dist/environment.tar.gz --compress-level 1 \
		$(patsubst %,--exclude '*/site-packages/pyspark/%/*',jars examples data licenses)
	@chmod 644 dist/environment.tar.gz && du -shL dist/*

BASE ?= debian:12-slim
TAG ?= latest

.PHONY: buildah
buildah:
	@command -v buildah >/dev/null || { echo "buildah is not installed. On Debian, Ubuntu: apt-get install buildah" >&2; exit 1; }

images: buildah wheel jars build/bridge.cdx.json build/jobs.cdx.json ## build the container images bridge and jobs with buildah (TAG=1, BASE=IMAGE, ARGS="--isolation chroot")
	buildah build --layers --build-arg BASE=$(BASE) --file deploy/packaging/images/Containerfile $(ARGS) --target bridge --tag localhost/kiln-bridge:$(TAG) .
	buildah build --layers --build-arg BASE=$(BASE) --file deploy/packaging/images/Containerfile $(ARGS) --target jobs --tag localhost/kiln-jobs:$(TAG) .

docs: $(VENV)/.installed ## build the documentation site in build/site; mkdocs checks every link
	@rm -rf build/docs && mkdir -p build/docs
	@git ls-files -z ':(glob)*.md' LICENSE docs 'conf/*.toml' conf/quality schemas/delta/views deploy/packaging/prometheus | xargs -0 cp --parents -t build/docs
	@$(BIN)/mkdocs build --strict --config-file deploy/packaging/mkdocs.yml
	@echo build/site/index.html

clean: ## remove .venv, .jars, .peers, builds and caches (never the state folder)
	rm -rf $(VENV) pipelines/native/*.so .jars .peers build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# ---- stamps: a target runs again when one of its sources is newer

$(VENV)/.python: conf/uv.lock
	@test -n "$(PYTHON)" || { echo "Kiln needs Python 3.11, 3.12 or 3.13, and none of $(PYTHONS) is one."; \
		echo "Install one (Debian, Ubuntu: apt-get install python3 python3-venv) or name it: make setup PYTHON=/path/to/python3.12"; exit 1; } >&2
	@$(PY) -c 'import pip, sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null || { rm -rf $(VENV); \
		$(PYTHON) -m venv $(VENV) >/dev/null 2>&1 || { rm -rf $(VENV); $(venv_missing); }; }
	@echo "$$($(PY) --version) in $(VENV)"
	@$(PY) -m pip install --quiet --disable-pip-version-check --require-hashes -r conf/uv.lock
	@touch $@

# Debian and Ubuntu have venv in a package of its own.
define venv_missing
version=$$($(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])'); \
	if command -v apt-get >/dev/null && [ "$$(id -u)" = 0 ]; then \
		echo "installing python$$version-venv"; \
		apt-get update -q >/dev/null; DEBIAN_FRONTEND=noninteractive apt-get install -y -q python$$version-venv </dev/null; \
		$(PYTHON) -m venv $(VENV); \
	else \
		echo "$(PYTHON) cannot make a virtual environment. On Debian and Ubuntu: sudo apt-get install python$$version-venv" >&2; exit 1; \
	fi
endef

# Checked before the large downloads: nothing runs without Java.
$(VENV)/.java: $(VENV)/.python deploy/stack/java.py
	@$(PY) -m kiln.deploy.stack.java --install
	@touch $@

$(VENV)/.installed: $(VENV)/.python requirements.lock pyproject.toml
	@echo "installing requirements.lock into $(VENV) (2.2 GB: the first time takes a minute or two)"
	@$(BIN)/uv pip install --quiet --compile-bytecode --python $(PY) --no-deps --require-hashes -r requirements.lock
	@$(BIN)/uv pip install --quiet --python $(PY) --no-deps --no-build-isolation --editable .
	@touch $@

# Without rustc, a line names the command, and Python decodes all frames.
$(VENV)/.native: $(VENV)/.installed $(wildcard native/src/*.rs) schemas/delta/tables.py
	@$(PY) -m kiln.deploy.stack.native_core
	@touch $@
