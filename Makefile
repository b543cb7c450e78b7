# The one list of commands, for people and for CI. Every target starts from a bare clone.
SHELL := /bin/bash
PYTHON ?= python3
BIN := .venv/bin
# Torch's threads otherwise spin against every other busy process.
export OMP_WAIT_POLICY ?= PASSIVE

.PHONY: help venv demo test smoke soak bench check protos docs model clean
.DEFAULT_GOAL := help

help: ## list the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 20

venv: .venv/.installed ## create .venv and install everything from the project's own files

.venv/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[runtime,text,gateway,events,tracing,convert,dev]'
	touch $@

demo: venv model ## the worked example, then real text under page pressure
	$(BIN)/pagemirror demo

# Tests wait for processes more than they compute: two at a time, whole files each.
test: venv model ## the whole test suite
	$(BIN)/python -m pytest -n 2 --dist loadfile

smoke: venv model ## forty questions to a real model, alone and under page pressure: is it still right?
	$(BIN)/python tools/accuracy_smoke.py

soak: venv ## ten minutes of killed, stopped and cut off processes, with every output checked
	$(BIN)/python benchmarks/soak.py --minutes 10

bench: venv ## measure beside transformers and TokenSpeed's schedulers, and write docs/performance.md from it
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[bench,fast]'
	$(BIN)/python benchmarks/bench_scheduler.py --json build/bench-scheduler.json
	$(BIN)/python benchmarks/bench_scaling.py --json build/bench-scaling.json
	$(BIN)/python benchmarks/bench_wire.py --json build/bench-wire.json
	$(BIN)/python benchmarks/bench_streaming.py --json build/bench-streaming.json
	$(BIN)/python benchmarks/bench_mirror.py --json build/bench-mirror.json
	$(BIN)/python benchmarks/bench_generate.py --rounds 2 --output build/bench-generate.json
	$(BIN)/python tools/write_performance.py build/bench-{scheduler,scaling,wire,streaming,mirror,generate}.json

check: venv ## lint, format, types, dependency contracts, generated files
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tools/generate_protos.py --check
	$(BIN)/python tools/generate_state_diagram.py --check

protos: venv ## regenerate the protobuf code
	$(BIN)/python tools/generate_protos.py

docs: venv ## regenerate the state diagram, the picture of the page rows and the dashboard
	$(BIN)/python tools/generate_state_diagram.py
	$(BIN)/python tools/draw_page_rows.py
	$(BIN)/python tools/draw_dashboard.py

model: venv models/smollm2-135m-instruct/model.safetensors ## fetch SmolLM2-135M-Instruct and convert it once

models/smollm2-135m-instruct/model.safetensors: | .venv/.installed
	$(BIN)/python tools/make_model.py

clean: ## remove what was built, models included
	rm -rf .venv models dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis
