# The two commands of a newcomer: `make quickstart` and `make test`.
PYTHON := .venv/bin/python
EXTRAS ?= dev

VLLM ?= cpu

.PHONY: quickstart test test-vllm install lint lock vllm-env

install:
	@sh bootstrap.sh "$(EXTRAS)"

quickstart: EXTRAS =
quickstart: install
	$(PYTHON) -m jaxrl.train configs/quickstart.toml $(ARGS)

test: install lint
	$(PYTHON) -m pytest -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder

lint: install
	.venv/bin/ruff check .
	.venv/bin/lint-imports

# vLLM's own environment, .vllm, with the server side of the bridge in it. VLLM=gpu for CUDA.
vllm-env:
	@sh bridge/server/install.sh "$(VLLM)" .vllm

# With real servers, half a minute to start each: what a few of them can tell in minutes. `make verify-bridge` runs everything.
test-vllm: install vllm-env
	$(PYTHON) -m pytest tests/vllm -m "not whole"

verify-bridge: vllm-env

# Long proofs: tests/proofs/proof_NAME.py; the last log of each is committed under docs/proofs/.
verify-%: install
	@mkdir -p docs/proofs
	bash -o pipefail -c '$(PYTHON) tests/proofs/proof_$*.py 2>&1 | tee docs/proofs/$*.log'

# Pins every dependency of every extra to the newest version that pyproject.toml allows.
lock:
	uv pip compile -q pyproject.toml --all-extras --universal --python-version 3.12 --no-header --no-annotate --upgrade -o lock.txt
