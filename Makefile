# Each target does its own set-up: a virtual environment in .venv with what it needs.

PYTHON ?= python3
VENV = .venv
BIN = $(VENV)/bin
# newest: pip itself is brought up to date first; empty: the one that comes with venv
PIP =
# pip only warns of an extra that it does not find under that name, and goes on without what is in it
PIP_INSTALL = sh .ci/pip-install $(BIN)/python --constraint constraints.txt

.PHONY: help demo demo-rmb rmb-long demo-pipeline test test-core test-docs lint docs dist bench bench-pipeline siege mutate soak lab operate-long container fuzz fuzz-guided spark-long spark-s3 clean

help:
	@echo "make demo      a whole dmsg network on this machine, in under a minute"
	@echo "make demo-rmb  a whole message bus: registry, relays, peers over Redis, services"
	@echo "make demo-pipeline  servers under load, then Spark over what they wrote, then a report (Java 17)"
	@echo "make test      the test suite, with its coverage"
	@echo "make test-core the same without Java and Spark"
	@echo "make test-docs every command and program of README and docs, run"
	@echo "make lint      ruff, mypy, import-linter"
	@echo "make docs      the documentation, into docs/_build/html"
	@echo "make dist      sdist and wheel, checked, and the demos from the wheel alone"
	@echo "make bench     benchmarks beside the limits of this machine (a quarter of an hour)"
	@echo "make bench-pipeline  the data pipeline beside DuckDB on the same machine (half an hour, 30 GB of disk)"
	@echo "make spark-long  the pipeline against DuckDB on 2 million events, ten kills, a cluster, a stream"
	@echo "make operate-long  an agent that is killed, every alert (Prometheus), pages in Chromium, codes between machines, a clock that is set"
	@echo "make container the image of contrib/container, on a Debian made here, and what runs in it (root, buildah, debootstrap)"
	@echo "make rmb-long  the bus: 10,000 messages over sixty kills; the official TypeScript client (node)"
	@echo "make siege     all entities under attack, and what others feel of it (twelve minutes; SIEGE='--seconds=4 --scene=relay' for less)"
	@echo "make mutate    what part of seeded mutants the tests notice (FILES='dmsg/rmb/envelope/wire.py' SAMPLE=60)"
	@echo "make soak      a network under load and faults for SECONDS=600"
	@echo "make lab       random walks over faults for SECONDS=600, and streams in network namespaces (root)"
	@echo "make fuzz      the property tests with many more examples"
	@echo "make fuzz-guided  parsers and tables of strangers' bytes, led by what they reach, for SECONDS=600 (FUZZ=--keep)"

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

# all but those of Spark, which are run in one process: each worker would start a Java of its own
CORE_TESTS = $(patsubst tests/%/__init__.py,tests.%,$(filter-out tests/analytics/%,$(wildcard tests/*/__init__.py))) \
	$(patsubst tests/%.py,tests.%,$(wildcard tests/test_*.py))

# per cent of lines and branches; less is an error
COVERAGE ?= 83

test: $(VENV)/.spark
	@rm -f .coverage .coverage.*
	$(BIN)/python -m coverage run -m tests.run -j3 --temp-directory=_trial_temp $(CORE_TESTS)
	$(BIN)/python -m coverage run -m tests.run --temp-directory=_trial_temp_spark tests.analytics
	$(BIN)/python -m coverage combine --quiet
	$(BIN)/python -m coverage report --fail-under=$(COVERAGE)
	@$(BIN)/python -m tests.run --summary _trial_temp _trial_temp_spark

# the same without Java and Spark
test-core: $(VENV)/.test
	$(BIN)/python -m tests.run -j3 --temp-directory=_trial_temp $(CORE_TESTS)
	@$(BIN)/python -m tests.run --summary _trial_temp

# every command and every program of README and docs, run as it stands
test-docs: $(VENV)/.test
	$(BIN)/python -m tests.run -j2 --temp-directory=_trial_temp_docs tests.docs.suite
	@$(BIN)/python -m tests.run --summary _trial_temp_docs

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m twisted.trial --temp-directory=_trial_temp_lint tests.contracts_run

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

siege: $(VENV)/.test
	$(BIN)/python -m benchmarks.siege $(SIEGE)

$(VENV)/.mutation: $(VENV)/.test
	@echo "installing what makes mutants into $(VENV)"
	$(PIP_INSTALL) --editable '.[mutation,redis,rmb,test]'
	@touch $@

FILES ?= dmsg/rmb/envelope/wire.py
SAMPLE ?= 60
$(VENV)/.fuzz: $(VENV)/.test
	@echo "installing what guides fuzzing by what it reaches into $(VENV)"
	$(PIP_INSTALL) --editable '.[fuzz,redis,rmb,test]'
	@touch $@

fuzz-guided: $(VENV)/.fuzz
	$(BIN)/python -m tests.fuzz --seconds $(SECONDS) $(FUZZ)

mutate: $(VENV)/.mutation
	$(BIN)/python -m tests.mutation $(FILES) --sample $(SAMPLE)

bench-pipeline: $(VENV)/.spark
	$(BIN)/python -m benchmarks.pipeline

$(VENV)/.spark-connect: $(VENV)/.spark
	@echo "installing what Spark Connect needs into $(VENV)"
	$(PIP_INSTALL) --editable '.[redis,rmb,spark,spark-connect,test,test-spark]'
	@touch $@

$(VENV)/.spark-s3: $(VENV)/.spark
	@echo "installing an object store to try into $(VENV)"
	$(PIP_INSTALL) --editable '.[redis,rmb,spark,test,test-s3,test-spark]'
	@touch $@

# Spark fetches what it needs for it once, 700 MB
spark-s3: $(VENV)/.spark-s3
	$(BIN)/python -m twisted.trial --temp-directory=_trial_temp_s3 tests.analytics.s3_run

LONG ?= tests.analytics.long_runs tests.analytics.real_run tests.analytics.json_run
spark-long: $(VENV)/.spark-connect
	$(BIN)/python -m twisted.trial --temp-directory=_trial_temp_spark $(LONG)

operate-long: $(VENV)/.test
	$(BIN)/python -m twisted.trial --temp-directory=_trial_temp \
		tests.cli.long_services tests.contrib.long_alerts tests.pages.long_browser tests.testing.long_codes \
		tests.docs.long_pictures tests.net.long_clock tests.net.long_sites

container: $(VENV)/.test
	$(BIN)/python -m twisted.trial --temp-directory=_trial_temp tests.contrib.long_container

rmb-long: $(VENV)/.test
	$(BIN)/python -m twisted.trial --temp-directory=_trial_temp tests.rmb.long_runs

SECONDS ?= 600
soak: $(VENV)/.test
	$(BIN)/python -m benchmarks.soak --seconds $(SECONDS)

lab: $(VENV)/.test
	$(BIN)/python -m twisted.trial --temp-directory=_trial_temp tests.testing.long_namespaces
	$(BIN)/python -m dmsg.testing.walk --seconds $(SECONDS)

EXAMPLES ?= 20000
fuzz: $(VENV)/.test
	HYPOTHESIS_EXAMPLES=$(EXAMPLES) $(BIN)/python -m twisted.trial --temp-directory=_trial_temp tests.test_keys tests.noise tests.v2019 tests.messaging tests.rmb.test_wire tests.rmb.test_delivery tests.rmb.test_random_input tests.rmb.test_door.PlainTests tests.rmb.test_tfchain tests.discovery.entries.test_entry tests.net.test_faults.RandomTests

clean:
	rm -rf $(VENV) build dist *.egg-info .coverage .coverage.* _trial_temp* docs/_build .tox .mypy_cache .ruff_cache .hypothesis
