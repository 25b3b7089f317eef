# SPDX-License-Identifier: Apache-2.0
# Every target sets up what it needs in .venv (vLLM-Omni, which is large, in .venv-vllm-omni); python3 (3.10 to 3.12) and make are enough. Settings: .ci/setup_env.sh

BIN := .venv/bin
OMNI := .venv-vllm-omni
OLDEST := .venv-torch-2.11
# Where an image sets it, each process compiles this package anew, and each pytest process all assertions
unexport PYTHONDONTWRITEBYTECODE

# What `make quickstart` hands to verl, e.g. make quickstart ARGS="trainer.total_training_steps=3"
ARGS ?=
# How many runs `make chaos` simulates, and which
ORDERS ?= 10000
SEED ?= 7

# What shellcheck reads, in `make lint`
SCRIPTS := .ci/run .ci/setup_env.sh docker/lock.sh examples/*.sh examples/*/*.sh

.PHONY: quickstart test lint-beside-e2e test-unit test-e2e test-long test-grids mutations chaos test-vllm-omni lint docs docs-pictures format dist clean

quickstart:  ## train a tiny model here and now
	@.ci/setup_env.sh
	PATH="$(CURDIR)/$(BIN):$$PATH" examples/quickstart.sh $(ARGS)

test: lint-beside-e2e test-unit  ## what a change must pass

lint-beside-e2e:  ## the end-to-end runs wait for half of their time; each one's output comes whole, at its end
	@.ci/setup_env.sh dev
	$(MAKE) -j 2 --output-sync=target lint test-e2e

test-unit:  ## three files at a time, because some wait for Ray; those that take longest first
	@.ci/setup_env.sh dev
	$(BIN)/python -m pytest -m "not (e2e or gpu or long)" -n 3 --dist loadfile --no-loadscope-reorder

test-e2e:  ## a run on each placement, and one that is resumed
	@.ci/setup_env.sh dev
	$(BIN)/python -m pytest -m "e2e and not (gpu or long)" tests/e2e

test-long:  ## ten end-to-end runs: faults, an environment, stale samples, video, edits, the facade; several ranks; three files at a time; CI too
	@.ci/setup_env.sh dev
	$(BIN)/python -m pytest -m "long and not grid" -n 3 --dist loadfile

test-grids:  ## what is not worth CI's time, before a release: further end-to-end runs, architectures, ranks and settings of what the other targets try, the package in bare environments, and the oldest PyTorch (more than an hour)
	@.ci/setup_env.sh dev
	$(BIN)/python -m pytest -m grid -n 2 --dist loadfile
	@VENV=$(OMNI) .ci/setup_env.sh dev,vllm-omni
	$(OMNI)/bin/python -m pytest -m grid tests/vllm_omni
	@VENV=$(OLDEST) TORCH_VERSION=2.11.0 .ci/setup_env.sh dev
	$(OLDEST)/bin/python -m pytest -m "not (e2e or gpu or grid)" -n 2 --dist loadfile --no-loadscope-reorder tests/contracts tests/engine tests/plugin/test_versions.py

mutations:  ## wrong code, one fault at a time: a test must notice each (10 minutes on 2 cores)
	@.ci/setup_env.sh dev
	$(BIN)/python -m tests.mutations

chaos:  ## runs with random faults on a virtual clock; no Ray (5 minutes on 2 cores)
	@.ci/setup_env.sh dev
	$(BIN)/python -W ignore -m tests.chaos --orders $(ORDERS) --seed $(SEED)

test-vllm-omni:  ## what needs the extra vllm-omni, two tests at a time; its end-to-end runs alone, because beside the others they take three times as long
	@VENV=$(OMNI) .ci/setup_env.sh dev,vllm-omni
	$(OMNI)/bin/pyright --pythonpath $(OMNI)/bin/python verl_digen/rollout/vllm_omni
	$(OMNI)/bin/python -m pytest -m "not (gpu or grid)" -n 2 --dist worksteal --ignore tests/vllm_omni/test_e2e.py tests/vllm_omni
	$(OMNI)/bin/python -m pytest -m "not (gpu or grid)" tests/vllm_omni/test_e2e.py

lint: docs  ## style, types, scripts, links of the docs, and that no room imports from a floor above
	@.ci/setup_env.sh dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports --no-cache --no-logo
	$(BIN)/shellcheck $(SCRIPTS)
	$(BIN)/hadolint docker/Dockerfile
	! git grep -nE '^(<{7}|>{7}) '  # marks of a merge

docs:  ## the site of docs/, in build/docs; a broken link or anchor fails (seconds)
	@.ci/setup_env.sh dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict  # with --quiet it would not count warnings

docs-pictures:  ## pictures of README and docs from the folder of one finished quick start, RUN=FOLDER (needs chromium)
	cp $(RUN)/images/before_after.png docs/images/quickstart.png
	chromium --headless --no-sandbox --disable-gpu --hide-scrollbars --virtual-time-budget=9000 --window-size=1280,3000 --screenshot=docs/report.png "file://$(abspath $(RUN))/report.html"
	$(BIN)/python -c "from PIL import Image; image = Image.open('docs/report.png'); image.quantize(128).save('docs/report.png')"

format:  ## what `make lint` can repair by itself
	@.ci/setup_env.sh dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

dist:  ## sdist and wheel in dist/, as an index accepts them; the version is that of the tag (see CONTRIBUTING.md)
	@.ci/setup_env.sh dev
	rm -rf dist
	$(BIN)/python -m build
	$(BIN)/python -m twine check --strict dist/*

clean:  ## remove what builds and tests leave; .venv and outputs/ stay
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache
	find . -name __pycache__ -not -path './.venv*/*' -prune -exec rm -rf {} +
