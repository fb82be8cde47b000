# Every target sets up .venv by itself on a fresh machine; nothing else needs to be installed by hand.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
READY := $(VENV)/.ready
# containers like to forbid compiled modules: each of the hundred processes of our stories would compile Atoll anew
export PYTHONDONTWRITEBYTECODE :=

.PHONY: headline demo test wheel-test gpu check docs reference results long bench setup clean

setup: $(READY)

# every file is compared with its hash; a torch that is there already (2.13.0, of any kind) is left as it is
LOCKED := $(PY) -m pip install --quiet --require-hashes --no-deps
CUDA := import importlib.metadata as m; raise SystemExit(not any("nvidia" in r for r in m.requires("torch") or ()))
$(READY): pyproject.toml constraints.txt constraints-torch.txt constraints-cuda.txt
	$(PYTHON) -m venv $(VENV)
	$(LOCKED) --no-index -r constraints-torch.txt 2>/dev/null || true # a wheel that PIP_FIND_LINKS has
	$(LOCKED) -r constraints-torch.txt -r constraints.txt
	! $(PY) -c '$(CUDA)' || $(LOCKED) -r constraints-cuda.txt
	$(PY) -m pip install --quiet --no-deps --no-build-isolation -e .
	touch $(READY)

demo: $(READY)
	$(PY) -m atoll demo

test: $(READY)
	$(PY) -m pytest

# sdist and wheel, and README's commands from the wheel in a new environment; BORROW=--borrow downloads nothing
wheel-test: $(READY)
	$(PY) tools/wheel_test.py $(BORROW)

# what only a machine with a GPU can tell, 10 minutes: the tests that need one, then memory and times;
# with packages and torch of your own, which nothing then touches: make gpu PY=python3 READY=
gpu: $(READY)
	failed=0; $(PY) -m pytest -m gpu -n 0 -rs || failed=1; $(PY) bench/gpu.py || failed=1; exit $$failed

check: $(READY)
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/lint-imports
	$(VENV)/bin/basedpyright

# the site: docs/_build/html/index.html; a warning, such as a broken link, is an error
docs: $(READY)
	$(VENV)/bin/sphinx-build -q -W --keep-going -c docs . docs/_build/html

# measures the benches of bench/results again, about 20 minutes on an idle machine
headline results: $(READY)
	$(PY) tools/benchmark_reference.py --measure

# writes the generated pages anew: commands, settings, errors, facts, benchmarks
reference: $(READY)
	$(PY) tools/reference.py

# full seed and fuzz counts, some hours on two cores; then sieges on all cores, of any size:
# make long MINUTES=600 SIEGE="--peers 100 --rounds 100"
MINUTES ?= 60
JOBS ?= $(shell $(PYTHON) -c "import os; print(os.cpu_count())")
SIEGE ?= --rounds 8
long: $(READY)
	$(PY) -m pytest -m "hypothesis and not long" --hypothesis-profile=new
	ATOLL_FUZZ=100000 $(PY) -m pytest -m long --timeout=3600
	$(PY) -m atoll simulate siege $(SIEGE) --swarm --minutes $(MINUTES) --jobs $(JOBS)

# each at most 90 s on two cores; not among them, though they have a --quick, too:
# topology (root), mnist, under_attack and pareto (want data), allreduce, robust_reduce and aggregate (beside others)
BENCHES := handshake transport codec wire way_back consensus verify sim_scale reduce_scale meet survive straggler \
	blackout soak growth exact effort hostile convergence scores twins utilisation round_cost erasure apart power_loss \
	reveal kill join audit agreement
bench: $(READY)
	for script in $(BENCHES); do $(PY) bench/$$script.py --quick || exit 1; done

clean:
	rm -rf $(VENV) docs/_build
