"""What a command says while a call of an environment does not come back."""

import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.run.watching import wait_until

from tidemill.cli import hanging_calls

WAITS = """
import time
from pathlib import Path
import gymnasium
import numpy as np

class Waits(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self):
        while not Path("engine").exists():
            time.sleep(0.01)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}

    def step(self, action):
        return np.zeros(2, np.float32), 1.0, False, False, {}
"""


def test_a_constructor_that_hangs_is_told_where_it_is(tmp_path: Path) -> None:
    (tmp_path / "waits.py").write_text(WAITS)
    code = (
        "from tidemill.cli import hanging_calls\nhanging_calls.LOOK_S = 0.5\n"
        "from tidemill.cli.main import app; app()"
    )
    said = tmp_path / "said"
    with said.open("w") as errors:
        command = subprocess.Popen(
            [sys.executable, "-c", code, "check-env", "waits.py:Waits"],
            cwd=tmp_path,
            stdout=subprocess.DEVNULL,
            stderr=errors,
        )
    try:
        wait_until(lambda: "__init__ (waits.py:1" in said.read_text(), 120, "it is told")
        (tmp_path / "engine").touch()
        assert command.wait(120) == 0
    finally:
        command.kill()
        command.wait()
    assert "a call has not come back for 0.5 s: " in said.read_text()


def test_a_call_is_told_once_and_others_than_at_the_last_look_never(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second, third = ("a", "b", "c")
    seen = iter([None, first, second, first, first, first, first, None, None, third, third, None])
    left = [12]

    def look(thread: int) -> object:
        left[0] -= 1
        return next(seen)

    monkeypatch.setattr(hanging_calls, "_call_of", look)
    over = SimpleNamespace(wait=lambda seconds: not left[0])
    hanging_calls._watch(over, threading.get_ident())  # type: ignore[arg-type]
    assert capsys.readouterr().err.count("a call has not come back") == 2


def test_a_call_is_what_is_not_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    own = threading.get_ident()
    assert hanging_calls._call_of(0) is None
    monkeypatch.setattr(hanging_calls, "_PACKAGE", hanging_calls.__file__)
    assert hanging_calls._call_of(own) is None  # it looks at itself
    found: list[object] = []
    asks = {"__name__": "click.termui", "look": hanging_calls._call_of, "own": own, "found": found}
    exec(compile("def confirm(): found.append(look(own))", "termui.py", "exec"), asks)
    monkeypatch.setattr(hanging_calls, "_PACKAGE", __file__)
    asks["confirm"]()  # type: ignore[operator]
    assert found == [None]
    monkeypatch.setattr(hanging_calls, "_PACKAGE", "nowhere")
    assert hanging_calls._call_of(own) is not None  # nothing is ours: the outermost one
