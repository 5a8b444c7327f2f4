# `make train`, `make test` and `make bench` each do all the set-up they need, then their job. Set-up is redone when a pinned version or pyproject.toml
# changes. `make bench` says first how long it takes, two hours about, and goes on with ARGS=--continue; ARGS="cartpole --runs 3" takes minutes.
PYTHON ?= python3
BIN := .venv/bin
PINS := pyproject.toml requirements.lock install.sh hatch_build.py src/tidemill/native/build.py $(wildcard src/tidemill/native/*.[ch])

SANITIZED := .venv/sanitized/libkernels.so.1

# What a process compiles of Python is kept, wherever PYTHONDONTWRITEBYTECODE is set: else each of hundreds would compile it anew.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: train check test static style types floors collection sanitize avx2 bench results clean
.DELETE_ON_ERROR:

train: .venv/ready-to-train
	$(BIN)/tidemill train CartPole-v1 --stop-at-return 475

# What can be told without whole runs.
check: static
	$(BIN)/pytest -n 2 tests/api tests/core tests/algorithms tests/nets tests/replay tests/transports tests/streams

# Two processes more than the two cores of continuous integration: a third of the suite's time is waiting.
test: static
	$(BIN)/pytest -n 4 --dist worksteal

# Each of them keeps one core busy.
static: .venv/ready-to-test
	$(MAKE) -j2 --output-sync=target types floors collection style

types: .venv/ready-to-test
	$(BIN)/mypy

floors: .venv/ready-to-test
	$(BIN)/lint-imports

# All tests can be collected; what that compiles, no process of pytest's compiles again.
collection: .venv/ready-to-test
	$(BIN)/pytest --collect-only -qq >.venv/collected || { tail -n 100 .venv/collected; false; }

style: .venv/ready-to-test
	$(BIN)/ruff check
	$(BIN)/ruff format --check

# The native core's tests under the address and undefined-behaviour sanitizers; torch's own leaks are not ours. Wide layers, which take
# minutes there, in one instruction set. One process, as of avx2: the two legs keep two cores busy side by side (`make -j2 sanitize avx2`).
sanitize: .venv/ready-to-test $(SANITIZED)
	LD_PRELOAD=$$($${CC:-cc} -print-file-name=libasan.so) ASAN_OPTIONS=detect_leaks=0 NATIVE_LIBRARY=$(CURDIR)/$(SANITIZED) \
	$(BIN)/pytest -q tests/native/test_kernels.py tests/native/test_layers.py tests/native/test_dqn.py tests/native/test_draws.py \
	tests/native/test_learning.py tests/native/test_traces.py tests/native/test_ticks.py tests/native/test_cart_pole.py \
	-k "not (test_layers and (baseline or avx512 or number_of_threads))"

# With -O3, as what is installed, that would take three times as long.
$(SANITIZED): .venv/ready-to-test
	$(BIN)/python -m tidemill.native.build $(@D) -O2 -g1 -fsanitize=address,undefined -fno-sanitize-recover=undefined

# Tests of kernels and learners as on a processor with AVX2 and no more, with the native core; and that it is there at all.
avx2: .venv/ready-to-test
	$(BIN)/python benchmarks/avx2.py $(BIN)/pytest -q -rs tests/native/test_kernels.py tests/native/test_layers.py tests/native/test_dqn.py \
	tests/native/test_draws.py tests/native/test_traces.py tests/native/test_ticks.py tests/native/test_learning.py tests/algorithms
	TIDEMILL_NATIVE=require $(BIN)/pytest -q tests/run/test_trains.py

bench: .venv/ready-to-test
	$(BIN)/python benchmarks/compare.py $(ARGS)
	$(BIN)/python benchmarks/compare.py --avx2 $(ARGS)

# How well the defaults learn, over the suite of tasks; goes on where it was cut, and says first how long it takes.
results: .venv/ready-to-test
	$(BIN)/python benchmarks/suite.py $(ARGS)

.venv/ready-to-train: $(PINS)
	./install.sh $(PYTHON) plot,video
	@touch $@

.venv/ready-to-test: $(PINS)
	./install.sh $(PYTHON) dev,box2d,minatar,minigrid,mujoco,atari,openenv,pettingzoo,plot,popgym,ray,rest,video,wandb
	@touch .venv/ready-to-train $@

clean:
	rm -rf .venv
