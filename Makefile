# The same short commands here, on a pod and in CI. Arguments for the program behind a target go into ARGS:
#   make run ARGS="--resume"        make test ARGS="tests/library -k stats"
SHELL := /bin/bash
VENV := $(or $(BOUNDBY_VENV),.venv)
PYTHON := "$(VENV)/bin/python"
RESULTS ?= results
WORKERS ?= 2

.PHONY: help setup setup-test run test truth bench lint bundle clean
.DEFAULT_GOAL := help

help:  ## say what there is to make
	@sed -nE 's/^([a-z-]+):.*## (.*)/make \1\t\2/p' Makefile | expand -t 14

setup:
	@bash setup_environment.sh --quiet

setup-test:
	@bash setup_environment.sh --test --quiet

run: setup  ## set up if needed, then the whole pipeline on configs/quickstart.yaml, offline
	$(PYTHON) run_pipeline.py --config configs/quickstart.yaml $(ARGS)

# One thread each: two workers with two OpenMP threads each on two cores spin against one another, up to 10 times slower.
test: setup-test  ## set up if needed, then the test suite (deterministic, no wall-clock tolerance)
	OMP_NUM_THREADS=1 $(PYTHON) -m pytest -m "not truth" -n $(WORKERS) $(ARGS)

truth: setup-test  ## wall-clock truth, many real kills, big sizes; prints every attempt
	$(PYTHON) -m pytest -m truth -s --timeout 3600 $(ARGS)

bench: setup-test  ## ratios against peers, each in one run
	@failed=; for file in benchmarks/[!_]*.py; do \
	    [[ -f $$file ]] || { echo "benchmarks/ holds no benchmark; nothing was measured"; break; }; \
	    echo "== $$file"; $(PYTHON) "$$file" $(ARGS) || failed+=" $$file"; \
	done; [[ -z $$failed ]] || { echo "failed:$$failed" >&2; exit 1; }

lint: setup-test  ## style and format
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .

# What a person reads or computes on at home: no evaluation shards (predictions.csv holds their result), no earlier runs,
# no half-written files, and no trace of 200 MB or more, which would cost more pod time than it is worth.
BUNDLED := -type f ! -path '*/previous/*' ! -name '.tmp-*' \
    \( -name '*.json' -o -name '*.jsonl' -o -name '*.csv' -o -name '*.txt' -o -name '*.html' -o -name '*.log' \
    -o -name '*.png' -o -name '*.gz' \)
LARGE := -size +199999999c

bundle:  ## pack what you take home from a pod; RESULTS=folder
	@[[ -f "$(RESULTS)/run.json" ]] || { echo "$(RESULTS)/run.json is missing: no run to pack there;" \
	    "make run, or name the folder: make bundle RESULTS=folder" >&2; exit 1; }
	@set -eo pipefail; bundle=$$PWD/boundby-results-$$(date -u +%Y%m%dT%H%M%SZ).tar.gz; \
	torn=$$PWD/.tmp-bundle-$$$$; trap 'rm -f "$$torn"' EXIT; cd "$(RESULTS)"; folder=$$(basename "$$PWD"); cd ..; \
	find "$$folder" $(BUNDLED) ! $(LARGE) -print0 | tar --null -czf "$$torn" -T -; mv "$$torn" "$$bundle"; \
	find "$$folder" $(BUNDLED) $(LARGE) -printf 'left out, 200 MB or more: %p\n'; \
	echo "$$bundle ($$(du -h "$$bundle" | cut -f 1))"; \
	echo "at home: scp -P $${RUNPOD_TCP_PORT_22:-PORT} 'root@$${RUNPOD_PUBLIC_IP:-HOST}:$$bundle' ."

clean:  ## remove results/ and caches; data/ and the environment stay
	rm -rf results build .pytest_cache .ruff_cache *.egg-info
	find . \( -path ./.venv -o -path ./data \) -prune -o -name __pycache__ -prune -exec rm -rf {} +
	@echo "data/ and $(VENV)/ stay; to remove them too: rm -r data '$(VENV)'"
