# Each target does its own set-up: a virtual environment in .venv with what it needs.

PYTHON ?= python3
VENV = .venv
BIN = $(VENV)/bin
# newest: pip itself is brought up to date first; empty: the one that comes with venv
PIP =
# pip only warns of an extra that it does not find under that name, and goes on without what is in it
PIP_INSTALL = sh .ci/pip-install $(BIN)/python --constraint constraints.txt

.PHONY: help demo demo-rmb demo-pipeline test test-core test-pipeline lint docs dist bench long walks clean

help:
	@echo "make demo           a whole dmsg network on this machine, in under a minute"
	@echo "make demo-rmb       a whole message bus: registry, relays, peers over Redis, services"
	@echo "make demo-pipeline  servers under load, then Spark over their events, then a report (Java 17)"
	@echo "make test           the test suite (COVERAGE=83 also measures what it reaches)"
	@echo "make test-core      the test suite without Java and Spark"
	@echo "make test-pipeline  the tests of the pipeline alone"
	@echo "make lint           ruff, mypy, import-linter"
	@echo "make docs           the documentation, into docs/_build/html"
	@echo "make dist           sdist and wheel, checked, and the demos from the wheel alone"
	@echo "make bench          benchmarks beside the limits of this machine (a quarter of an hour)"
	@echo "make long           tests that take minutes: lists them; make long WHICH=siege runs one"
	@echo "make walks          random walks of each protocol family over faults and lies, on all cores (SECONDS=60 for each)"
	@echo "make clean          remove everything that make has made"

# the marks say which extras are installed, and are renewed when setup.cfg changes
$(VENV)/.created:
	$(PYTHON) -c 'import sys; sys.exit("dmsg needs Python 3.11 or newer") if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)
	$(if $(filter newest,$(PIP)),$(BIN)/python -m pip install --quiet --upgrade pip)
	@touch $@

$(VENV)/.run: $(VENV)/.created setup.cfg constraints.txt
	@echo "installing dmsg into $(VENV)"
	$(PIP_INSTALL) --editable .
	@touch $@

$(VENV)/.rmb: $(VENV)/.created setup.cfg constraints.txt
	@echo "installing dmsg and what the message bus needs into $(VENV)"
	$(PIP_INSTALL) --editable '.[rmb,rmb-demo]'
	@touch $@ $(VENV)/.run

$(VENV)/.test: $(VENV)/.created setup.cfg constraints.txt
	@echo "installing dmsg and what its tests need into $(VENV)"
	$(PIP_INSTALL) --editable '.[redis,rmb,test]'
	@touch $@ $(VENV)/.run

$(VENV)/.spark: $(VENV)/.created setup.cfg constraints.txt
	@echo "installing dmsg and Spark into $(VENV)"
	$(PIP_INSTALL) --editable '.[redis,rmb,spark,test,test-spark]'
	@touch $@ $(VENV)/.test $(VENV)/.run

$(VENV)/.dev: $(VENV)/.created setup.cfg constraints.txt
	@echo "installing dmsg and the tools of its developers into $(VENV)"
	$(PIP_INSTALL) --editable '.[dev]'
	@touch $@ $(VENV)/.test $(VENV)/.run

demo: $(VENV)/.run
	$(BIN)/dmsg demo

demo-rmb: $(VENV)/.rmb
	$(BIN)/dmsg rmb demo

demo-pipeline: $(VENV)/.spark
	$(BIN)/dmsg analytics demo

# All packages but that of the pipeline: its tests with Spark share two processes, since each worker would start a Java
# of its own.
CORE_TESTS = $(patsubst tests/%/__init__.py,tests.%,$(filter-out tests/analytics/%,$(wildcard tests/*/__init__.py))) \
	$(patsubst tests/%.py,tests.%,$(wildcard tests/test_*.py))

# Number of processes for the tests: some of them wait most of the time.
JOBS ?= 5
# Percentage of lines and branches that the tests must reach; nothing is measured without one, as that doubles the time.
COVERAGE ?=
MEASURED = $(if $(COVERAGE),-m coverage run)

# Tests start hundreds of programs. Without stored bytecode, each would compile its modules again.
test test-core test-pipeline: export PYTHONDONTWRITEBYTECODE =

# The tests of the pipeline: those with Java, and beside them those without.
PIPELINE_TESTS = $(MEASURED) -m tests.run --temp-directory=_trial_temp_spark tests.analytics.test_spark \
		-- $(MEASURED) -m tests.run --temp-directory=_trial_temp_spark_runs tests.analytics.test_spark_runs \
		-- $(MEASURED) -m tests.run --temp-directory=_trial_temp_arrow tests.analytics.test_arrow tests.analytics.test_full_disk

test: $(VENV)/.spark
	@rm -f .coverage .coverage.*
	$(BIN)/python -m tests.alongside $(PIPELINE_TESTS) \
		-- $(MEASURED) -m tests.run -j$(JOBS) --temp-directory=_trial_temp $(CORE_TESTS)
	$(if $(COVERAGE),$(BIN)/python -m coverage combine --quiet)
	$(if $(COVERAGE),$(BIN)/python -m coverage report --fail-under=$(COVERAGE))
	@$(BIN)/python -m tests.run --summary _trial_temp _trial_temp_arrow _trial_temp_spark _trial_temp_spark_runs

test-core: $(VENV)/.test
	$(BIN)/python -m tests.run -j$(JOBS) --temp-directory=_trial_temp $(CORE_TESTS)
	@$(BIN)/python -m tests.run --summary _trial_temp

test-pipeline: $(VENV)/.spark
	$(BIN)/python -m tests.alongside $(PIPELINE_TESTS)
	@$(BIN)/python -m tests.run --summary _trial_temp_arrow _trial_temp_spark _trial_temp_spark_runs

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m twisted.trial --temp-directory=_trial_temp_lint tests.contracts_run tests.docs.types_run

docs: $(VENV)/.dev
	$(BIN)/sphinx-build --fail-on-warning --keep-going --quiet docs docs/_build/html

$(VENV)/.dist: $(VENV)/.created setup.cfg constraints.txt
	@echo "installing what builds and checks distributions into $(VENV)"
	$(PIP_INSTALL) --editable '.[dist]'
	@touch $@ $(VENV)/.run

dist: $(VENV)/.dist
	.ci/dist $(BIN)/python

bench: $(VENV)/.test
	$(BIN)/python -m benchmarks

# Tests that take minutes. The text after ## is the line in the list; .ci/run takes the parts by turns, in this order.
PARTS := $(shell sed -n 's/^long-\([a-z0-9-]*\):.*\#\# .*/\1/p' $(firstword $(MAKEFILE_LIST)))

ifeq ($(WHICH),)
long:
	@sed -n 's/^long-\([a-z0-9-]*\):.*## \(.*\)/\1|\2/p' $(firstword $(MAKEFILE_LIST)) | awk -F'|' '{ printf "%-15s %s\n", $$1, $$2 }'
else
# Every part is run, even after one that failed.
long:
	$(if $(filter-out all $(PARTS),$(WHICH)),$(error no long tests are called $(filter-out all $(PARTS),$(WHICH)); make long lists them))
	@failed=; for part in $(if $(filter all,$(WHICH)),$(PARTS),$(WHICH)); do \
		echo "=== long: $$part"; \
		$(MAKE) --no-print-directory long-$$part || failed="$$failed $$part"; \
	done; \
	if [ -n "$$failed" ]; then echo "failed:$$failed"; exit 1; fi
endif

TRIAL = $(BIN)/python -m twisted.trial --temp-directory=_trial_temp_$(@)
.PHONY: $(addprefix long-,$(PARTS))

long-siege: $(VENV)/.test ## all entities under attack, and what others feel of it (12 minutes; SIEGE='--seconds=4 --scene=relay' for less)
	$(BIN)/python -m benchmarks.siege $(SIEGE)

SECONDS ?= 600
long-soak: $(VENV)/.test ## a network under load and faults (SECONDS=600)
	$(BIN)/python -m benchmarks.soak --seconds $(SECONDS)

$(VENV)/.spark-connect: $(VENV)/.spark
	@echo "installing what Spark Connect needs into $(VENV)"
	$(PIP_INSTALL) --editable '.[redis,rmb,spark,spark-connect,test,test-spark]'
	@touch $@

PIPELINE ?= $(patsubst tests/analytics/%.py,tests.analytics.%,$(wildcard tests/analytics/long_*.py)) \
	tests.analytics.real_run tests.analytics.json_run
long-pipeline: $(VENV)/.spark-connect ## the pipeline against DuckDB on 2 million events, ten kills, a cluster, a stream (PIPELINE=tests.analytics.real_run)
	$(TRIAL) $(PIPELINE)

EXAMPLES ?= 20000
# All modules with property tests, and the one that hands schemathesis its number of examples.
FUZZED = $(shell grep -rl "^from hypothesis" tests --include='test_*.py') tests/net/test_openapi.py
long-fuzz: $(VENV)/.test ## the property tests with many examples (EXAMPLES=20000)
	HYPOTHESIS_EXAMPLES=$(EXAMPLES) $(BIN)/python -m tests.run -j$(JOBS) --temp-directory=_trial_temp_$(@) $(subst /,.,$(FUZZED:.py=))
	@$(BIN)/python -m tests.run --summary _trial_temp_$(@)

long-lab: $(VENV)/.test ## random walks of each protocol family over faults and lies, and networks in network namespaces (SECONDS=600; root)
	$(TRIAL) tests.testing.long_namespaces tests.testing.long_machines
	$(MAKE) --no-print-directory walks

# Families of walks, those with the longest walks first. Each core runs one family at a time.
WALKS_OF = "walk --lies" code_walk walk agent_walk bus_walk messaging_walk discovery_walk
walks: $(VENV)/.test
	@printf '%s\n' $(WALKS_OF) | xargs -P "$$(getconf _NPROCESSORS_ONLN)" -I FAMILY \
		sh -c '$(BIN)/python -m dmsg.testing.FAMILY --seconds $(SECONDS)'

$(VENV)/.spark-s3: $(VENV)/.spark
	@echo "installing an object store for tests into $(VENV)"
	$(PIP_INSTALL) --editable '.[redis,rmb,spark,test,test-s3,test-spark]'
	@touch $@

long-s3: $(VENV)/.spark-s3 ## the pipeline on an object store (Spark fetches 700 MB once)
	$(TRIAL) tests.analytics.s3_run

long-programs: $(VENV)/.test ## the tests of the commands and entities, with each program started and not forked
	DMSG_TESTS_FORK=0 $(BIN)/python -m tests.run -j$(JOBS) --temp-directory=_trial_temp_$(@) tests.cli tests.collector tests.net tests.tap
	@$(BIN)/python -m tests.run --summary _trial_temp_$(@)

$(VENV)/.mutation: $(VENV)/.test
	@echo "installing what makes mutants into $(VENV)"
	$(PIP_INSTALL) --editable '.[mutation,redis,rmb,test]'
	@touch $@

FAMILIES ?=
SAMPLE ?= 200
long-mutate: $(VENV)/.mutation ## whether tests notice seeded mutants of the cores (FAMILIES="v2019 rmb" SAMPLE=200)
	$(BIN)/python -m tests.mutation $(FAMILIES) --sample $(SAMPLE)

WALKS ?= 100
long-mutate-walks: $(VENV)/.test ## in how many walks each hand-made mutant is found (WALKS=100)
	$(BIN)/python -m tests.mutation.by_walks --walks $(WALKS)

long-proofs: $(VENV)/.test ## the models of docs/proofs (spin and gcc; verifpal)
	$(TRIAL) tests.streams.long_model tests.streams.long_protocol_models

CHANGES ?= 400000
long-power-cuts: $(VENV)/.test ## what stores, spools and uploads lose in power cuts, on a simulated disk (CHANGES=400000)
	$(BIN)/python -m tests.testing.power_cuts --changes $(CHANGES) --seed $$(date +%s)
	POWER_CUTS=300 $(TRIAL) tests.testing.test_traced_files

long-docs: $(VENV)/.test ## every command and program of README and docs
	$(BIN)/python -m tests.run -j2 --temp-directory=_trial_temp_$(@) tests.docs.suite
	@$(BIN)/python -m tests.run --summary _trial_temp_$(@)

long-container: $(VENV)/.test ## the image of contrib/container, on a Debian made here (root, buildah, debootstrap)
	$(TRIAL) tests.contrib.long_container

$(VENV)/.fuzz: $(VENV)/.test
	@echo "installing a fuzzer that is guided by coverage into $(VENV)"
	$(PIP_INSTALL) --editable '.[fuzz,redis,rmb,test]'
	@touch $@

long-fuzz-guided: $(VENV)/.fuzz ## parsers and tables of untrusted bytes, guided by coverage (SECONDS=600 FUZZ=--keep)
	$(BIN)/python -m tests.fuzz --seconds $(SECONDS) $(FUZZ)

long-operate: $(VENV)/.test ## a killed agent, every alert (Prometheus), pages in Chromium, codes between machines, a clock that is set, a thousand clients
	$(TRIAL) tests.cli.long_services tests.contrib.long_alerts tests.pages.long_browser tests.testing.long_codes tests.testing.long_lan \
		tests.docs.long_pictures tests.net.long_clock tests.net.long_crowd tests.net.long_proxy_timeouts tests.net.long_sites

long-rmb: $(VENV)/.test ## the bus: 10,000 messages over sixty kills; the official TypeScript client (node)
	$(TRIAL) tests.rmb.long_runs

long-bench-pipeline: $(VENV)/.spark ## the data pipeline beside DuckDB on the same machine (half an hour, 30 GB of disk)
	$(BIN)/python -m benchmarks.pipeline

# CI takes the parts by turns, in this order, so a new part is added at the end.
long-stalls: $(VENV)/.test ## tests over real TCP in a process that is stalled at random times, as on a busy machine (SECONDS=600)
	$(BIN)/python -m tests.stalls --seconds $(SECONDS)

clean:
	rm -rf $(VENV) build dist *.egg-info .coverage .coverage.* _trial_temp* docs/_build .tox .mypy_cache .ruff_cache .hypothesis
