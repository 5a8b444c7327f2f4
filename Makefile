# `make train`, `make test` and `make bench` each do all the set-up they need, then their job. Set-up is redone when a pinned version or pyproject.toml
# changes. `make bench` says first how long it takes, two hours about, and goes on with ARGS=--continue; ARGS="cartpole --runs 3" takes minutes.
PYTHON ?= python3
BIN := .venv/bin
PINS := pyproject.toml requirements.lock install.sh hatch_build.py src/tidemill/native/build.py src/tidemill/native/kernels.c

.PHONY: train check test static sanitize bench clean
.DELETE_ON_ERROR:

train: .venv/ready-to-train
	$(BIN)/tidemill train CartPole-v1 --stop-at-return 475

# What can be told without whole runs.
check: static
	$(BIN)/pytest -n 2 tests/api tests/core tests/algorithms tests/nets tests/replay tests/transports tests/streams

test: static
	$(BIN)/pytest -n 2

static: .venv/ready-to-test
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

# The native core's tests under the address and undefined-behaviour sanitizers; torch's own leaks are not ours.
sanitize: .venv/ready-to-test
	LD_PRELOAD=$$($${CC:-cc} -print-file-name=libasan.so) ASAN_OPTIONS=detect_leaks=0 \
	NATIVE_FLAGS="-fsanitize=address,undefined -fno-sanitize-recover=undefined -g" $(BIN)/pytest -n 2 tests/native/test_kernels.py

bench: .venv/ready-to-test
	$(BIN)/python benchmarks/compare.py $(ARGS)

.venv/ready-to-train: $(PINS)
	./install.sh $(PYTHON) plot,video
	@touch $@

.venv/ready-to-test: $(PINS)
	./install.sh $(PYTHON) dev,box2d,minatar,mujoco,atari,openenv,pettingzoo,plot,popgym,rest,video,wandb
	@touch .venv/ready-to-train $@

clean:
	rm -rf .venv
