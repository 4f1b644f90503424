# Two commands do everything on a fresh machine:  make check   and   make test
PYTHON ?= python3
BIN := .venv/bin
# `make test` uses no GPU: on a machine that has one, its environment is .venv-cpu, beside .venv.
TEST_BIN = $(shell $(PYTHON) tools/make_env.py --tests --print-directory)/bin

# Every process that a test starts would compile this package, and pytest every test, again.
unexport PYTHONDONTWRITEBYTECODE

# Two processes, a file of tests at a time; directories in this order, so that engines start first.
PYTEST = CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1 $(TEST_BIN)/python -m pytest -n 2 --dist loadscope --no-loadscope-reorder

.PHONY: check test test-clients test-gpu test-fast test-rest test-grid test-cpus test-stacks test-all env env-sglang env-tests lint docs docs-serve tiny-gpt-oss tiny-gpt-oss-tools example bench clean help

check: env  ## the main job on the embedded model: vLLM samples, a 2-rank FSDP2 world scores again
	$(BIN)/mismatch check --model tiny-gpt-oss

test: env-tests  ## every feature at least once, on real engines; uses no GPU (20 minutes)
	$(PYTEST) -m "not grid"

test-fast:  ## unit tests and the command line, without engines (3 minutes)
	@$(PYTHON) tools/make_env.py --tests
	$(PYTEST) -m "not grid and not slow" tests/unit tests/cli

test-rest: test-grid test-cpus  ## both of the following

test-grid: env-tests  ## the grids: families, distributions, simulations, kills (an hour)
	$(PYTEST) -m "grid and not stack"

test-cpus: env-tests  ## the unit tests as other CPUs would run them, simulated
	$(TEST_BIN)/python tools/other_machine.py old
	$(TEST_BIN)/python tools/other_machine.py plain

test-stacks: env-tests  ## other versions in environments of their own; every line of the first pages; engines with planted faults (40 minutes)
	$(PYTEST) -m stack tests/integration/test_documentation.py tests/integration/test_stacks.py tests/integration/test_known_issue_runs.py

test-all: test test-rest test-stacks  ## every test there is

env:  ## .venv at the root; CPU or CUDA flavour found by itself; does nothing when up to date
	@$(PYTHON) tools/make_env.py

env-sglang:  ## .venv-sglang at the root, for --engine sglang: its pins clash with vLLM's
	@$(PYTHON) tools/make_env.py --sglang

env-tests:  ## what the tests need: both engines on the CPU, Megatron-Core, and a browser for the report's page
	@$(PYTHON) tools/make_env.py --tests
	@$(PYTHON) tools/make_env.py --tests --sglang
	@test -d .megatron/megatron || $(TEST_BIN)/python -m pip install -q --no-deps --target .megatron megatron-core==0.16.1 \
		|| echo "Megatron-Core could not be installed: its tests are skipped"
	@$(TEST_BIN)/python tools/get_browser.py

test-gpu: env  ## what only a GPU can show, in 25 minutes: proof/proof.json, to send; then a table (gpu.json) of 10
	$(BIN)/python benchmarks/gpu_proof.py --out proof --resume; proved=$$?; \
	$(BIN)/python benchmarks/gpu_gpt_oss.py --json gpu.json && exit $$proved

test-clients: env  ## mlflow's and trackio's own clients, in .clients: their pins clash with vLLM's
	$(BIN)/python -m pip install -q --upgrade --target .clients --only-binary :all: 'mlflow-skinny>=3.1' 'trackio>=0.5'
	PYTHONPATH=$(CURDIR)/.clients $(BIN)/python -m pytest tests/unit/test_sinks.py -k "mlflow or trackio"

lint: env  ## ruff, mypy, and the layers of the rooms
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: .venv-docs  ## the documentation site, into build/site; broken links fail
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict

docs-serve: .venv-docs  ## the documentation site at http://127.0.0.1:8000
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs serve

.venv-docs: pyproject.toml
	test -x $@/bin/python || $(PYTHON) -m venv $@
	$@/bin/python -m pip install -q -e '.[docs]'
	@touch $@

tiny-gpt-oss: env  ## train the embedded model again (about 15 minutes on 2 cores)
	$(BIN)/python tools/train_tiny_gpt_oss.py --out mismatch/models/tiny-gpt-oss

tiny-gpt-oss-tools: env  ## train its sibling that calls a calculator (half an hour at most)
	$(BIN)/python tools/train_tiny_gpt_oss.py --tools --out mismatch/models/tiny-gpt-oss-tools

example: env  ## the saved run under examples/, the README's pictures, those of "Read your report"
	$(BIN)/python tools/make_pictures.py
	$(BIN)/python tools/annotate_report.py

bench: env  ## speed and memory against their floors; docs/evidence/benchmarks.md has the goals (about half an hour)
	for name in startup logprobs long_sequences sequence_parallel attention memory experts mxfp4 fixes end_to_end metrics explorer; do $(BIN)/python benchmarks/$$name.py || exit 1; done

clean:  ## runs and caches; not the environment
	rm -rf runs build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis

help:
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*##/\t/' | expand -t 16
