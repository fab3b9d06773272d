# The same short commands here, on a pod and in CI. Arguments for the program behind a target go into ARGS:
#   make run ARGS="--resume"        make test ARGS="tests/library -k stats"
SHELL := /bin/bash
VENV := $(or $(BOUNDBY_VENV),.venv)
PYTHON := "$(VENV)/bin/python"
RESULTS ?= results
RUNS ?= runs
STEPS ?= 20
WORKERS ?= 2

.PHONY: help setup setup-test setup-gpu setup-docs run test truth bench gpu lint docs bundle clean \
    prune setup-training setup-monitor profile profile-train profile-check profile-dashboard profile-clean monitor
.DEFAULT_GOAL := help

help:  ## say what there is to make
	@sed -nE 's/^([a-z-]+):.*## (.*)/make \1\t\2/p' Makefile | expand -t 24

setup:
	@bash setup_environment.sh --quiet

setup-test:
	@bash setup_environment.sh --test --quiet

setup-gpu:
	@bash setup_environment.sh --gpu --quiet

setup-docs:
	@bash setup_environment.sh --docs --quiet

setup-training:
	@bash setup_environment.sh --training --quiet

setup-monitor:
	@bash setup_environment.sh --monitor --quiet

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

gpu: setup-gpu  ## the checks that need a GPU, in eight minutes; exit code 2 without one
	@$(PYTHON) -m pytest -q tests/gpu $(ARGS)

lint: setup-test  ## style, format, types, and known vulnerabilities of what is installed
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy
	$(PYTHON) setup/lock.py --audit

# Not --quiet, which hides the warnings from --strict too.
docs: setup-docs  ## the site, into build/site; fails on a link that leads nowhere
	NO_MKDOCS_2_WARNING=1 $(PYTHON) -m mkdocs build --strict
	@echo "open build/site/index.html"

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
	find -L "$$folder" $(BUNDLED) ! $(LARGE) -print0 | tar --null -czhf "$$torn" -T -; mv "$$torn" "$$bundle"; \
	find -L "$$folder" $(BUNDLED) $(LARGE) -printf 'left out, 200 MB or more: %p\n'; \
	echo "$$bundle ($$(du -h "$$bundle" | cut -f 1))"; \
	echo "at home: scp -P $${RUNPOD_TCP_PORT_22:-PORT} 'root@$${RUNPOD_PUBLIC_IP:-HOST}:$$bundle' ."

# Runs of training loops. RUN names one folder; otherwise the newest in RUNS is meant.
TRAIN = $(PYTHON) scripts/profile_training.py --profiler on

profile: setup-training  ## record STEPS=20 steps of a small training loop, as a test of the profiler
	$(TRAIN) --steps $(STEPS) $(ARGS)

profile-train: setup-training  ## train for two epochs with the profiler on
	$(TRAIN) --epochs 2 $(ARGS)

profile-check: setup-training  ## check a recorded run, and say what to do about it; RUN=folder
	@run="$(RUN)"; [[ -n $$run ]] || run=$$(ls -td "$(RUNS)"/*/ 2>/dev/null | head -n 1); \
	[[ -n $$run ]] || { echo "$(RUNS)/ holds no run: make profile, or name one: make profile-check RUN=folder" >&2; exit 1; }; \
	set -x; $(PYTHON) scripts/check_profile.py "$${run%/}" --analysis $(ARGS)

monitor: setup-monitor  ## watch the runs in RUNS=runs in a browser, live
	@mkdir -p "$(RUNS)"  # before the first run the page says how to make one
	$(PYTHON) scripts/monitor.py "$(RUNS)" $(ARGS)

profile-dashboard: monitor  ## the same as make monitor

# A trace of a run lies in profiling.output_dir too, as a link or a copy: a file there with its content is the run's. What
# another program has put there stays.
profile-clean:  ## remove the training runs in RUNS=runs that have ended, with their traces elsewhere; all else stays
	@remove_logs() { \
	    logs=$$(sed -nE '/"profiling"/,/\}/s/^ *"output_dir": "(.*)",?$$/\1/p' "$$1/config.json"); \
	    [[ $$logs == /* ]] || logs=./$$logs; [[ $$logs != ./ && -d $$logs ]] || return; \
	    find "$$1" -maxdepth 1 -type f -name '*trace*.json' -print0 | while IFS= read -r -d '' trace; do \
	        find "$$logs/" -mindepth 2 -maxdepth 2 -type f \( -name 'rank*.pt.trace.json' -o -name '*chrome_trace.json' \) \
	            -size "$$(stat -c %s "$$trace")c" -exec cmp -s "$$trace" {} \; -print0; \
	    done | sort -zu | while IFS= read -r -d '' log; do \
	        rm -f -- "$$log"; folder=$${log%/*}; rmdir -- "$$folder" "$${folder%/*}" 2>/dev/null; \
	    done; \
	}; \
	here="$$(cat /proc/sys/kernel/random/boot_id 2>/dev/null) $$(readlink /proc/self/ns/pid)"; \
	for run in "$(RUNS)"/*/; do \
	    run=$${run%/}; grep -qs '"kind": "training_run"' "$$run/config.json" || continue; \
	    pid=$$(sed -nE 's/^ *"pid": ([0-9]+),$$/\1/p' "$$run/config.json"); \
	    space=$$(sed -nE 's/^ *"process_space": "(.*)",$$/\1/p' "$$run/config.json"); \
	    if [[ $$space == "$$here" ]]; then \
	        if kill -0 "$$pid" 2>/dev/null || [[ -e /proc/$${pid:-none} ]]; then echo "$$run: process $$pid runs; it stays"; continue; fi; \
	    elif { ! ls "$$run"/*stage_times.json >/dev/null 2>&1 || grep -qsE '"status": ?"running"' "$$run"/*stage_times.json; } && \
	        [[ -n $$(find "$$run" -mmin -1440 -print -quit) ]]; then \
	        echo "$$run: may run still on another machine, where it wrote less than a day ago; it stays"; continue; \
	    fi; \
	    remove_logs "$$run"; rm -r -- "$$run" && echo "removed $$run"; \
	done

KEEP ?= 3
prune:  ## remove what earlier runs left in RESULTS/previous, but for the newest KEEP=3
	@[[ "$(KEEP)" =~ ^[0-9]+$$ ]] || { echo "KEEP is '$(KEEP)'; give a number: make prune KEEP=3" >&2; exit 2; }; \
	find "$(RESULTS)/previous" -mindepth 1 -maxdepth 1 -type d -regextype posix-extended \
	    -regex '.*/[0-9]{8}T[0-9]{6}Z(-[0-9]+)?' 2>/dev/null | sort -V | head -n -$(KEEP) | while IFS= read -r folder; do \
	    size=$$(du -sh -- "$$folder" | cut -f 1); rm -r -- "$$folder" && echo "removed $$folder ($$size)"; \
	done

clean:  ## remove results/ and caches; data/ and the environment stay
	[[ ! -d results ]] || find results -mindepth 1 -maxdepth 1 ! -name README.md -exec rm -rf {} +
	rm -rf build .pytest_cache .ruff_cache .mypy_cache *.egg-info
	find . \( -path ./.venv -o -path ./data \) -prune -o -name __pycache__ -prune -exec rm -rf {} +
	@echo "data/ and $(VENV)/ stay; to remove them too: rm -r data '$(VENV)'"
