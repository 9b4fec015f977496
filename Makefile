# Every target makes its own virtual environment first (.venv); nothing else has to be installed but Python 3.10-3.13.
#
#   make test PYTHON=python3.12        another interpreter
#   make venv PIP_ARGS="--extra-index-url https://download.pytorch.org/whl/cpu"     torch without CUDA on Linux

PYTHON ?= python3
VENV ?= .venv
PIP_ARGS ?=
WORKERS ?= 2
PYTEST_ARGS ?=

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# The newest versions there are, without constraints.
NEXT := $(VENV)-next
# What the demo needs: no tools of development.
DEMO_STAMP := $(VENV)/.installed-for-the-demo
# The oldest versions allowed, over the packages of $(VENV): only what differs is installed twice.
OLDEST := $(VENV)-oldest
OLDEST_STAMP := $(OLDEST)/.installed
# What meets transformers' own code: its calls, graphs of its models, layers, files, and configs of its families.
OLDEST_TESTS := $(addprefix tests/,cache/test_generate.py \
	$(addprefix cache/test_compiled.py::test_,prompts_are_read_in_chunks_without_a_graph_each other_families_compile \
	the_first_call_of_a_growing_cache_is_not_traced_into_the_store) \
	saving/test_serialization.py saving/test_interrupted.py layers \
	$(addprefix tools/test_estimate.py::test_,an_estimate_is_what_a_cache_holds_after_a_prefill \
	an_estimate_of_decoding_is_what_a_cache_holds_after_a_step layers_of_full_size_are_estimated_exactly) \
	tools/test_cli.py kernels/test_frontend.py kernels/test_cached_launches.py test_ways.py test_fence.py)
# By itself: it asks for an older transformers (tests/cache/test_eviction.py).
PRUNING := kvpress==0.5.5
# By itself: a torch that comes with CUDA asks for a Triton of its own.
HAS_TRITON := sys_platform == 'linux' and (platform_machine == 'x86_64' or platform_machine == 'aarch64')
OLDEST_TRITON := "triton==3.5.0; $(HAS_TRITON)"
# The newest Triton that is supported, for the frontend's tests: torch brings an older one here.
NEWEST_TRITON := "triton==3.9.0; $(HAS_TRITON)"
TRITON := $(VENV)-triton
TRITON_STAMP := $(TRITON)/.installed
PYTEST := $(BIN)/python -m pytest --timeout=900 $(PYTEST_ARGS)
SPREAD := -n $(WORKERS) --dist worksteal
QUICK := not slow and not cuda and not child
# Those with a test that runs the file again in Triton's interpreter (kernels, and what chooses between them and torch).
INTERPRETED_TESTS = $(shell grep -rl '= child(__file__)' tests)
# One thread a worker: two workers with a thread each finish sooner than one with two, and do not fight over cores.
# Compiled modules are kept: workers, and the processes that tests start, import the same ones again.
PARALLEL := env OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false PYTHONDONTWRITEBYTECODE=

COMMA := ,

.DEFAULT_GOAL := help
.PHONY: help venv demo docs test test-newest test-oldest test-next test-kernels test-slow test-cuda test-images lint format tables notebooks wheel clean

help:
	@echo "make demo | test | test-newest | test-oldest | test-next | test-kernels | test-slow | test-cuda | test-images | lint | format"
	@echo "make tables | notebooks | docs | wheel | venv | clean"

# $(call install,PACKAGES,WHAT): says what is downloaded, and afterwards how much it was and how long it took.
define install
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Into $(VENV) go $(2). torch with CUDA is gigabytes; without: see the head of the Makefile."
	@start=$$(date +%s) && \
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) -c constraints.txt -e $(1) && \
	echo "$$(du -sm $(VENV) | cut -f1) MB in $(VENV), after $$(($$(date +%s) - start)) seconds."
	touch $@
endef

$(STAMP): pyproject.toml constraints.txt
	$(call install,".[dev]",torch$(COMMA) transformers$(COMMA) and the tools of development)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps $(PRUNING)

$(DEMO_STAMP): pyproject.toml constraints.txt
	$(call install,".[real]",torch$(COMMA) transformers$(COMMA) and what they need)

PURELIB := -c "import sysconfig; print(sysconfig.get_path('purelib'))"

$(OLDEST_STAMP): $(STAMP) constraints-oldest.txt
	test -x $(OLDEST)/bin/python || $(PYTHON) -m venv $(OLDEST)
	$(BIN)/python $(PURELIB) > "$$($(OLDEST)/bin/python $(PURELIB))/__newest.pth"
	$(OLDEST)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints-oldest.txt -e .
	$(OLDEST)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps $(OLDEST_TRITON)
	touch $@

$(TRITON_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $(TRITON) $(NEWEST_TRITON)
	touch $@

venv: $(STAMP)

# Threads that wait passively cost nothing on a free machine, and a great deal less on a busy one.
demo: $(DEMO_STAMP)
	env OMP_WAIT_POLICY=PASSIVE $(BIN)/python examples/quickstart.py

# The notebooks as they are opened on Colab and Kaggle: on a venv with the versions of the image and without tq_hf, which
# their first cell installs. Needs the image's Python; torch without CUDA as for `make venv`.
test-images: $(addprefix test-image-,$(notdir $(basename $(wildcard tests/images/*.txt))))
test-image-%: PYTHON_OF = python$(shell sed -n 's/^\# Python //p' tests/images/$*.txt)
test-image-%:
	rm -rf $(VENV)-$*
	$(PYTHON_OF) -m venv $(VENV)-$*
	$(VENV)-$*/bin/python -m pip install --quiet $(PIP_ARGS) -c tests/images/$*.txt \
		$(shell sed -n 's/==.*//p' tests/images/$*.txt) ipykernel nbmake pytest
	env OMP_NUM_THREADS=2 $(VENV)-$*/bin/python -m pytest --nbmake --nbmake-timeout=1200 -c /dev/null examples/*.ipynb

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

test: lint test-newest test-oldest

test-newest: $(STAMP)
	$(PARALLEL) $(PYTEST) $(SPREAD) -m "$(QUICK)" --nbmake --ignore=tests/kernels tests \
		examples/quickstart.ipynb examples/serving.ipynb

# What touches transformers most, on its oldest supported version, and every kernel on the oldest Triton.
test-oldest: $(OLDEST_STAMP)
	$(PARALLEL) $(OLDEST)/bin/python -m pytest --timeout=900 $(PYTEST_ARGS) $(SPREAD) \
		-m "$(QUICK)" -o cache_dir=.pytest_cache/oldest $(OLDEST_TESTS)

# The ways that users use, the names that they stand on, and the kernels, on what `pip install` brings today.
test-next:
	test -x $(NEXT)/bin/python || $(PYTHON) -m venv $(NEXT)
	$(NEXT)/bin/python -m pip install --quiet --disable-pip-version-check --upgrade $(PIP_ARGS) -e ".[dev]"
	$(NEXT)/bin/python -m pip list --disable-pip-version-check | grep -E "^(torch|transformers|triton) "
	$(PARALLEL) $(NEXT)/bin/python -m pytest --timeout=900 $(PYTEST_ARGS) $(SPREAD) -m "$(QUICK)" \
		-o cache_dir=.pytest_cache/next tests/test_ways.py tests/test_fence.py tests/kernels/test_frontend.py

# The kernels by themselves: in Triton's interpreter, and compiled for every GPU they are written for. (The frontend's
# tests are for the oldest Triton and the newest: under the one between, all that they compile is compiled here, too.)
test-kernels: $(STAMP) $(TRITON_STAMP)
	$(PARALLEL) $(PYTEST) $(SPREAD) -m "$(QUICK)" --ignore=tests/kernels/test_frontend.py tests/kernels
	$(PARALLEL) PYTHONPATH=$(TRITON) $(PYTEST) $(SPREAD) -m "$(QUICK)" -o cache_dir=.pytest_cache/triton \
		tests/kernels/test_frontend.py tests/kernels/test_cached_launches.py
	$(PARALLEL) TRITON_INTERPRET=1 CUDA_VISIBLE_DEVICES= $(PYTEST) $(SPREAD) -m "$(QUICK)" $(INTERPRETED_TESTS)

test-slow: $(STAMP)
	$(PARALLEL) $(PYTEST) $(SPREAD) -m "slow and not cuda" tests

test-cuda: $(STAMP)
	$(PYTEST) -m cuda tests

# The tables of README.md and examples/results/README.md and the pictures, from the results in examples/results.
tables: $(STAMP)
	$(BIN)/python -m examples.measure.report.plots
	$(BIN)/python -m examples.measure.report.make_tables

# The notebooks' outputs, on this machine's CPU.
notebooks: $(STAMP)
	env CUDA_VISIBLE_DEVICES= $(BIN)/python -m examples.measure.report.run_notebooks

# The site of the documentation, from the pages of the repository and from docstrings, into build/site.
docs: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[docs]"
	$(BIN)/python docs/site.py build/pages
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet --config-file docs/mkdocs.yml

wheel: $(STAMP)
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .

clean:
	rm -rf $(VENV) $(OLDEST) $(NEXT) $(TRITON) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
