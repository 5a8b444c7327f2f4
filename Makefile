# `make train` and `make test` each do all the set-up they need, then their job. Set-up is redone when a pinned version or pyproject.toml changes.
PYTHON ?= python3
BIN := .venv/bin
PINS := pyproject.toml requirements.lock install.sh

.PHONY: train test clean
.DELETE_ON_ERROR:

train: .venv/ready-to-train
	$(BIN)/tidemill train CartPole-v1 --stop-at-return 475

test: .venv/ready-to-test
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/pytest -n 2

.venv/ready-to-train: $(PINS)
	./install.sh $(PYTHON) plot,video
	@touch $@

.venv/ready-to-test: $(PINS)
	./install.sh $(PYTHON) dev,box2d,mujoco,atari,plot,video
	@touch .venv/ready-to-train $@

clean:
	rm -rf .venv
