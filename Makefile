# make run    a virtual environment, the package in it, then the smoke runbook: a small model trained on real text
# make test   a virtual environment, the package in it, then every check
# make hooks  git merges notebooks and Jupyter cleans them on saving; says which files that touches
# make clean  remove the virtual environment and what tests and docs leave behind
#
# Choose with variables: PYTHON (3.11 or newer), VENV (where), PIP_ARGS (e.g. another index), FLAGS (notebook cells to add),
# WORKERS (test files at a time).
PYTHON   ?= $(or $(shell for p in python3.11 python3.12 python3.13 python3; do $$p -c '' 2>/dev/null && echo $$p && break; done),python3)
VENV     ?= .venv
PIP_ARGS ?=
FLAGS    ?=
WORKERS  ?= 2
PY       := $(VENV)/bin/python
STAMP    := $(VENV)/.installed

.PHONY: run test clean install hooks
.DEFAULT_GOAL := test

run: $(STAMP)
	@$(PY) tests/ci/run_runbook.py smoke

test: $(STAMP)
	@$(PY) tests/ci/check_clean.py
	@$(PY) tests/ci/nbdev_tests.py --flags "$(FLAGS)"
	@$(PY) -m pytest --durations=10 -n $(WORKERS) --dist loadfile -m "not runbook and not docs"
	@$(PY) -m pytest --durations=10 -n $(WORKERS) -m runbook
	@$(PY) -m pytest --durations=10 -m docs

install: $(STAMP)

# .gitconfig and .gitattributes are committed; nbdev writes them again as they are.
hooks: $(STAMP)
	@echo "This clone:  .git/config (include.path = ../.gitconfig: notebooks are merged cell by cell), .git/hooks/post-merge"
	@echo "Your home:   ~/.jupyter/jupyter_server_config.py, jupyter_notebook_config.py (Jupyter cleans a notebook as it saves it)"
	@echo "To undo:     git config --local --unset include.path; remove those three files"
	@PATH="$(abspath $(VENV))/bin:$$PATH" nbdev_install_hooks

# The stamp is newer than everything that decides what is installed, so a second call installs nothing.
$(STAMP): setup.py settings.ini constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "nsa_nb needs Python 3.11 or newer; this is " + sys.version.split()[0] + ". Set PYTHON=/path/to/python3.11")'
	@echo "Installing into $(VENV) (the first time this takes a few minutes) ..."
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	@$(PY) -m pip install -q --disable-pip-version-check $(PIP_ARGS) -c constraints.txt -e '.[dev,hf]' > $(VENV)/pip.log 2>&1 \
	  || { cat $(VENV)/pip.log; exit 1; }
	@touch $@

clean:
	rm -rf $(VENV) _proc _docs build dist *.egg-info .pytest_cache .hypothesis runs
