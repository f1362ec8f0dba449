# make demo    the whole thing on real pictures, from a bare clone
# make serve   keep the server up
# make test    everything that runs without a GPU
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python

.PHONY: env demo serve test test-faults test-clients test-gpu soak fuzz bench loadtest wheels docs

env: $(VENV)/.ready

demo: $(VENV)/.ready
	$(PY) build/demo.py $(ARGS)

serve: $(VENV)/.ready
	$(VENV)/bin/tessera serve $(ARGS)

test: $(VENV)/.tensorrt
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(PY) -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(ARGS)

# the kills, the disconnects and the bad input alone
test-faults: $(VENV)/.ready
	$(PY) -m pytest -m faults $(ARGS)

# attacks on a gateway, other people's clients whole, Ray, Helm's renderer, and odd pictures from another project's source package, downloaded
test-clients: $(VENV)/.clients
	$(PY) -m pytest -m clients $(ARGS)

# on a machine with a GPU; these tests skip themselves elsewhere
test-gpu: $(VENV)/.ready
	$(PY) -m pytest -m gpu $(ARGS)

# 30 minutes of mixed load; memory must stay flat and every request be answered
soak: $(VENV)/.ready
	$(PY) loadtest/soak.py $(ARGS)

# 10 minutes of new mutated inputs against a running server
fuzz: $(VENV)/.ready
	$(PY) loadtest/fuzz.py $(ARGS)

# a benchmark by its name, for instance: make bench NAME=load ARGS="--workloads W1 W4a"
# its figures are kept by: make bench NAME=... | .venv/bin/python loadtest/record.py
bench: $(VENV)/.ready
	$(PY) loadtest/bench $(NAME) $(ARGS)

# Locust for a minute against the server of `make serve`, and a report of it in loadtest.html; any other run by ARGS
# (loadtest/locustfile.py)
loadtest: $(VENV)/.loadtest
	$(VENV)/bin/locust -f loadtest/locustfile.py --headless --html loadtest.html \
	    $(or $(ARGS),--workload W4b --host localhost:8001 GrpcUser)

# the five wheels of pyproject.toml's [tool.tessera.wheels], in dist/
wheels: $(VENV)/.ready
	$(PY) build/wheels.py $(ARGS)

# the site of docs/, in site/: guides, a reference made from the code, internals, lab book (`make docs ARGS=serve` shows it)
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs $(or $(ARGS),build --quiet)

$(VENV)/.ready: requirements.txt requirements-tritonserver.txt requirements-dev.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check -r requirements.txt -r requirements-dev.txt
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps -r requirements-tritonserver.txt
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	touch $@

# what only the tests need, so that the demo does not wait for it
$(VENV)/.tensorrt: $(VENV)/.ready requirements-tensorrt.txt
	$(PY) -m pip install --quiet --disable-pip-version-check -r requirements-tensorrt.txt
	touch $@

$(VENV)/.loadtest: $(VENV)/.ready requirements-loadtest.txt
	$(PY) -m pip install --quiet --disable-pip-version-check -r requirements-loadtest.txt
	touch $@

# some want other versions of what we have and run with ours: so nothing that they ask for is installed; AIPerf, which
# is used as a command only, has an environment of its own
$(VENV)/.clients: $(VENV)/.loadtest requirements-clients.txt requirements-aiperf.txt
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps -r requirements-clients.txt
	$(PYTHON) -m venv $(VENV)/aiperf
	$(VENV)/aiperf/bin/pip install --quiet --disable-pip-version-check -r requirements-aiperf.txt
	touch $@

# all that they need is pinned there: python-dateutil as in requirements-clients.txt
$(VENV)/.docs: $(VENV)/.ready requirements-docs.txt
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps -r requirements-docs.txt
	touch $@
