PYTHON ?= $(shell for one in python3.11 python3.12 python3.13; do $$one -c '' 2>/dev/null && echo $$one && break; done)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# Where nothing is written beside the sources, each of some thousand processes of the tests compiles them again.
export PYTHONDONTWRITEBYTECODE :=

SCENARIOS ?= $(sort $(basename $(notdir $(wildcard benchmarks/scenarios/*.toml))))

.PHONY: demo test test-slow test-torch frameworks test-random lint mutants docs report-picture faults growth schedule-overhead threads windows schedules results results-page predictions limits clean

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null || { echo "offbeat needs Python 3.11, 3.12 or 3.13: install one, or name it: make PYTHON=/path/to/python3.11"; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { echo "$(PYTHON) cannot make virtual environments: install its venv package (Debian: python3-venv)"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[examples,lab,plot,dev]"
	touch $@

demo: $(STAMP)  ## train on four local workers
	$(BIN)/offbeat run --workers 4 examples/digits.py

# Most tests wait for processes most of the time: three at a time on two cores take a fifth less than two.
# They are handed out in order, in small portions: promises first.
PYTEST := $(BIN)/python -m pytest -n 3 --dist load --maxschedchunk 8 --durations 25

test: $(STAMP) lint  ## what the README and the pages promise (tests/promises.toml), then every other fast test
	$(PYTEST) -m "promise or not slow"

test-slow: $(STAMP)  ## the other tests; SLICE=3/24 runs the fourth of 24 parts, as CI does for some commits
	$(PYTEST) -m "slow and not promise" --timeout 600 $(if $(SLICE),--slice $(SLICE))

# The package index has this version as a build for GPUs of several GB, which runs on CPUs, too.
test-torch: TORCH ?= 2.14.1
test-torch: TORCH_BIN = .venv-torch-$(TORCH)/bin
test-torch:  ## parity, engine, fabrics and the backend on another version of torch: TORCH=2.14.1
	test -x $(TORCH_BIN)/python || $(PYTHON) -m venv .venv-torch-$(TORCH)
	sed '/^torch==/d' constraints.txt > .venv-torch-$(TORCH)/constraints.txt
	$(TORCH_BIN)/python -m pip install --quiet --disable-pip-version-check -c .venv-torch-$(TORCH)/constraints.txt torch==$(TORCH) -e ".[examples,lab,plot,dev]"
	$(TORCH_BIN)/python -m pytest -n 3 --dist worksteal --timeout 300 tests/parity tests/engine tests/fabric tests/c10d tests/conformance

frameworks: $(STAMP)  ## the adapters' tests, with the frameworks, and the table that is made of them (minutes)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[frameworks,examples]"
	$(BIN)/python -m tests.docs.framework_table

test-random: SEED ?= $(shell od -An -N3 -tu4 /dev/urandom | tr -d ' ')
test-random: $(STAMP)  ## the tests of `make test` in another order each time, or in that of SEED=...
	$(PYTEST) -m "promise or not slow" --random-order-seed $(SEED)

mutants: $(STAMP)  ## small faults, one at a time, that the tests have to find (half an hour; ARGS="--room sync" for one room)
	$(BIN)/python -m tests.mutants --json tests/mutants/result.json $(ARGS)

docs: $(STAMP)  ## write the pages that are made from the code
	$(BIN)/python -m tests.docs.command_line
	$(BIN)/python -m tests.docs.compatibility
	$(BIN)/python -m tests.docs.simulator

report-picture: $(STAMP)  ## draw docs/report.png from the records of a job that lost a worker (needs chromium)
	$(BIN)/python -m tests.docs.report_picture

faults: $(STAMP)  ## what survives what: cells that are not in the result yet (a quiet machine, about an hour)
	$(BIN)/python -m benchmarks.faults

results: $(STAMP)  ## measure again (root, a quiet machine, four hours)
	$(BIN)/offbeat bench wire --tls --json benchmarks/results/wire.json
	$(BIN)/offbeat bench switch --json benchmarks/results/switch.json
	for name in $(SCENARIOS); do \
	  $(BIN)/offbeat lab run benchmarks/scenarios/$$name.toml \
	    --json benchmarks/results/$$name.json --png benchmarks/results/$$name.png || exit 1; \
	done
	$(BIN)/python -m benchmarks.page
	$(BIN)/python -m benchmarks.first_screen

predictions: $(STAMP)  ## simulate again what was measured
	for name in $(SCENARIOS); do \
	  test ! -e benchmarks/results/$$name.json || $(BIN)/offbeat simulate benchmarks/scenarios/$$name.toml \
	    --like benchmarks/results/$$name.json --write || exit 1; \
	done
	$(BIN)/python -m benchmarks.page

limits: $(STAMP)  ## what each row could take at least, anew from what was measured, and the pictures
	$(BIN)/python -m benchmarks.limits
	$(BIN)/python -m benchmarks.page

growth: $(STAMP)  ## how long simulated steps take, with up to 1,000 workers (a quiet machine, minutes)
	$(BIN)/python -m benchmarks.growth
	$(BIN)/python -m benchmarks.page

schedule-overhead: $(STAMP)  ## what schedules cost the thread that trains (a quiet machine, minutes)
	$(BIN)/python -m benchmarks.schedule_overhead
	$(BIN)/python -m benchmarks.page

threads: $(STAMP)  ## what it brings that workers share the cores (a quiet machine, minutes)
	$(BIN)/python -m benchmarks.threads
	$(BIN)/python -m benchmarks.page

windows: $(STAMP)  ## what it saves to let workers be ahead where steps are late now and then, simulated (minutes)
	$(BIN)/python -m benchmarks.windows
	$(BIN)/python -m benchmarks.page

schedules: $(STAMP)  ## what the order of gradients is worth on the model alone, simulated (a minute)
	$(BIN)/python -m benchmarks.schedules
	$(BIN)/python -m benchmarks.page

results-page: $(STAMP)  ## write the page of results, the table of docs/robust.md, and the picture of README.md's first screen
	$(BIN)/python -m benchmarks.page
	$(BIN)/python -m benchmarks.first_screen

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) runs build dist *.egg-info
