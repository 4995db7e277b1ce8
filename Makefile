# Everything here runs in .venv, which the first target that needs it creates. PYTHON chooses the interpreter for it.
PYTHON ?= python3
VENV   := .venv
PY     := $(VENV)/bin/python
STAMP  := $(VENV)/.stamp
SEED   ?= 1
# Tests mostly wait: three at a time on two cores. One at a time when some are chosen, so that `-s` shows what they say.
JOBS   ?= $(if $(ARGS),0,3)
# empty: `make full` runs the tests and leaves the benchmarks (hours) out
BENCH  ?= yes

.PHONY: demo test full lint bench bench-all proof clean
.DEFAULT_GOAL := test

$(STAMP): pyproject.toml constraints.txt
	@echo "aegis: making $(VENV) (a few minutes: it installs torch)"
	@$(PYTHON) -m venv $(VENV)
	@$(VENV)/bin/pip install --quiet --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,etcd]'
	@touch $@

demo: $(STAMP)
	@echo "aegis: training through a SIGKILL and an exception, 4 ranks"
	@$(PY) -m examples.demo

test: $(STAMP)
	@echo "aegis: tests"
	@start=$$(date +%s); $(PY) -m pytest -q -n $(JOBS) --dist loadfile --no-loadscope-reorder $(ARGS); rc=$$?; \
	  echo "aegis: tests took $$(( $$(date +%s) - start )) s"; exit $$rc

# Everything, the long ones too. What it found is kept with the commit and the seed that it ran with.
full: $(STAMP)
	@mkdir -p build
	@echo "aegis: all tests, the long ones too; results in build/full-results.txt"
	@{ echo "commit $$(git describe --always --dirty 2>/dev/null || echo unknown)"; echo "seed $(SEED)"; \
	   date -u +"started %Y-%m-%dT%H:%M:%SZ"; } > build/full-results.txt
	@set -o pipefail; AEGIS_SEED=$(SEED) $(PY) -m pytest -q -m "full or not full" \
	  --hypothesis-seed=$(SEED) --durations=25 $(ARGS) 2>&1 | tee -a build/full-results.txt; rc=$$?; \
	  if [ -n "$(BENCH)" ]; then $(MAKE) --no-print-directory bench-all 2>&1 \
	    | tee -a build/full-results.txt || rc=1; fi; exit $$rc

lint: $(STAMP)
	@echo "aegis: ruff and mypy --strict"
	@$(PY) -m ruff check .
	@$(PY) -m mypy
	@$(PY) -m tests.lengths

# Crashes, beside the peers, which it installs under build/peers; it says how long it takes before it begins.
bench: $(STAMP)
	@$(PY) -m benchmarks.recovery --json build/recovery.json $(ARGS)
	@$(PY) -m benchmarks.chart build/recovery.json build/recovery.svg

# Every fault, start-up, and what we cost while nothing happens; all go on when one has failed.
bench-all: $(STAMP)
	@rc=0; \
	  $(PY) -m benchmarks.startup --json build/startup.json || rc=1; \
	  $(PY) -m benchmarks.overhead --json build/overhead.json || rc=1; \
	  $(PY) -m benchmarks.recovery --faults all --json build/recovery.json || rc=1; \
	  $(PY) -m benchmarks.chart build/recovery.json build/recovery.svg || rc=1; exit $$rc

proof: $(STAMP)
	@echo "aegis: model checking"
	@$(PY) -m proof $(ARGS)

clean:
	rm -rf $(VENV) build .mypy_cache .ruff_cache .pytest_cache

full: SHELL := /bin/bash
