# One environment, .venv, made on first use. `make demo` needs the package alone, the other targets its dev tools, and
# `make test-extras` a second environment that is laid over it.
PYTHON ?= python3
PIP_ARGS ?= # further options of pip: where its packages come from, what it may use
BIN := .venv/bin
PIP_INSTALL = -m pip install --disable-pip-version-check -c constraints.txt $(PIP_ARGS)
INSTALL = $(BIN)/python $(PIP_INSTALL)
EXTRAS := ray eval trl notebooks # of pyproject.toml: what `make test-extras` installs beside the dev tools
EXTRAS_BIN := .venv-extras/bin
DOCS_BIN := .venv-docs/bin
# A program that prints what the named extras of pyproject.toml need.
REQUIREMENTS = 'import sys, tomllib; \
	extras = tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]; \
	print(*(need for name in sys.argv[1:] for need in extras[name] if "ramify-llm" not in need), sep="\n")'
SERVE ?= # further flags: make serve SERVE="--port 9000"
CPU_KERNELS := $(wildcard ramify/cpu/*.cpp ramify/cpu/*.h)
PROMPT ?= Once upon a time, in a small village by the sea,

.PHONY: demo test test-long test-search test-extras test-gpu check format docs count bench sanitize serve wheel dist clean

demo: .venv/.installed
	$(BIN)/ramify generate "$(PROMPT)" -n 4 --temperature 0.8 --max-tokens 48 --seed 7
	@echo
	@echo 'Next: . .venv/bin/activate, and then'
	@echo '    ramify generate "The best thing about trees is" -n 4 --temperature 0.8'
	@echo '    python examples/majority_vote.py'
	@echo '    ramify chat'
	@echo '    make serve              # and look at http://127.0.0.1:8000'

test: .venv/.installed-dev
	$(BIN)/python -m pytest -q -n auto --dist loadfile -m "not long"

test-long: .venv/.installed-dev
	$(BIN)/python -m pytest -q -n auto --dist loadfile -m long

# The other targets run the same random examples every time; this one looks for new ones, every time others.
test-search: .venv/.installed-dev
	$(BIN)/python -m pytest -q -n auto --dist loadfile -m hypothesis --hypothesis-profile search

# Whatever works with large packages that few people need. Elsewhere these tests are skipped and say so.
test-extras: .venv-extras/.installed
	$(EXTRAS_BIN)/python -m pytest -q -m "not long" tests/extras

check: .venv/.installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/clang-format --dry-run --Werror $(CPU_KERNELS)
	$(BIN)/mypy

format: .venv/.installed-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/clang-format -i $(CPU_KERNELS)
	$(BIN)/python docs/count.py --write >/dev/null
	$(BIN)/python docs/api.py --write
	$(BIN)/python docs/charts.py --write

# The site, build/site/index.html. Its tools come once, into an environment of their own; to build it needs no network.
docs: .venv-docs/.installed
	NO_MKDOCS_2_WARNING=1 $(DOCS_BIN)/mkdocs build --strict

# How much there is to read, by room; `make format` writes the tour's numbers where they are said.
count:
	@$(PYTHON) docs/count.py

bench: .venv/.installed-dev
	$(BIN)/python bench/startup.py
	$(BIN)/python bench/offline.py

# On a machine with a GPU: nearly all the time is compilation, so each file is a process of its own.
test-gpu:
	ls tests/kernels/test_*.py tests/gpu/test_*.py | xargs -P 8 -n 1 $(PYTHON) -m pytest -q -p no:cacheprovider

# On a machine with a GPU and CUDA's compute-sanitizer: every access of the kernels' tests, each allocation by itself.
sanitize:
	PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 9 \
		$(PYTHON) -m pytest -q -x -p no:cacheprovider tests/kernels -k "not gpu_ and not compile"

serve: .venv/.installed-server
	$(BIN)/ramify serve $(SERVE)

# A wheel that carries the CPU's kernels for common processors, so that no compiler is needed where it is installed. It is
# made on Linux and x86-64, with g++; `pip wheel .` makes one of plain Python anywhere.
wheel: .venv/.installed-dev
	rm -f dist/*.whl
	$(BIN)/python -m build --wheel --config-setting=--build-option=--kernels
	$(BIN)/python .ci/check_wheel.py dist/*.whl

# All of a release: the source distribution, and the same wheel made from that.
dist: .venv/.installed-dev
	rm -rf dist
	$(BIN)/python -m build --config-setting=--build-option=--kernels
	$(BIN)/python .ci/check_wheel.py dist/*.whl

clean:
	rm -rf .venv .venv-extras .venv-docs build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Ramify needs Python 3.11 or newer: make PYTHON=python3.11 demo")'
	$(PYTHON) -m venv .venv
	@echo
	@echo 'Now pip fetches PyTorch and some smaller packages into .venv.'
	@if [ "$$(uname -s)" = Linux ] && ! command -v nvidia-smi >/dev/null; then printf '%s\n' \
		'No NVIDIA GPU was found. PyTorch for Linux comes with CUDA all the same and' \
		'takes up to 5.5 GB on the disk; its CPU build takes 0.8 GB. To have that one,' \
		'press Ctrl-C and type' \
		'    make clean demo PIP_ARGS="--extra-index-url URL"' \
		'with the URL that the installation page of PyTorch shows for pip and CPU.'; fi
	@echo

.venv/.installed: .venv/bin/python pyproject.toml constraints.txt
	$(INSTALL) -e .
	@touch $@

.venv/.installed-server: .venv/bin/python pyproject.toml constraints.txt
	$(INSTALL) -e ".[server]"
	@touch $@ .venv/.installed

.venv/.installed-dev: .venv/bin/python pyproject.toml constraints.txt
	$(INSTALL) -e ".[dev]"
	@touch $@ .venv/.installed .venv/.installed-server

# A layer over .venv: what is there is used and never changed; what the extras need beside it is installed above it. The
# package itself is not: pip would build it with what lies below.
.venv-extras/.installed: .venv/.installed-dev
	$(BIN)/python -m venv .venv-extras
	$(BIN)/python -c 'import site; print(f"import site; site.addsitedir({site.getsitepackages()[0]!r})")' \
		> "$$($(EXTRAS_BIN)/python -c 'import site; print(site.getsitepackages()[0])')/below.pth"
	$(BIN)/python -c $(REQUIREMENTS) $(EXTRAS) > .venv-extras/requirements.txt
	$(EXTRAS_BIN)/python $(PIP_INSTALL) -r .venv-extras/requirements.txt
	@touch $@

# Small, and for the site alone: neither PyTorch nor the package is in it.
.venv-docs/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-docs
	$(PYTHON) -c $(REQUIREMENTS) docs > .venv-docs/requirements.txt
	$(DOCS_BIN)/python $(PIP_INSTALL) -r .venv-docs/requirements.txt
	@touch $@
