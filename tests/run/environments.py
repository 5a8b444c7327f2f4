"""Environments of the experiments for the tests of runs, in a file of their own: a worker
that plays none has no need of Gymnasium."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

from tidemill.core.thread_stacks import stack_of


class Talker(gymnasium.Env[Any, Any]):
    """An episode ends with every tenth step."""

    observation_space = gymnasium.spaces.Box(-1, 1, (2,))
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self) -> None:
        self.steps = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        return np.zeros(2, np.float32), 1.0, self.steps % 10 == 0, False, {}


class Tells(Talker):
    """Says, by a file in the working directory, that it was stepped."""

    def step(self, action: Any) -> Any:
        if self.steps == 0:
            Path("stepped").touch()
        return super().step(action)


class Raises(Talker):
    """Raises in the middle of training."""

    def step(self, action: Any) -> Any:
        if self.steps == 200:
            raise ValueError("the arm is broken")
        return super().step(action)


class NeverCloses(Raises):
    """Never comes back from being closed, and raises only where it `breaks`."""

    def __init__(self, breaks: bool) -> None:
        super().__init__()
        self.steps = 0 if breaks else 1000

    def close(self) -> None:
        while True:
            time.sleep(1000)


class Quits(Talker):
    """Exits in the middle of training."""

    def step(self, action: Any) -> Any:
        if self.steps == 200:
            sys.exit("the arm is gone")
        return super().step(action)


class Forks(Talker):
    """Forks itself in its 200th step; its child comes back, too, raises or exits."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def step(self, action: Any) -> Any:
        if self.steps == 200:
            if os.fork():
                os.wait()  # what that writes is there, then
            elif self.how == "raises":
                raise RuntimeError("no engine")
            elif self.how == "exits":
                sys.exit(0)
        return super().step(action)


class Numbered(Talker):
    """Sees which copy it is, as its seed says, in which episode and at which step, and is
    paid a number that follows from these."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (3,))
    copies = 16_777_199

    def __init__(self) -> None:
        super().__init__()
        self.episode = -1

    def _see(self) -> Any:
        return np.array([self.copy, self.episode, self.at], np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        if seed is not None:
            self.copy = seed % self.copies
        self.episode, self.at = self.episode + 1, 0
        return self._see(), {}

    def step(self, action: Any) -> Any:
        self.at += 1
        over = self.at == 3 + (self.copy + self.episode) % 29
        reward = float(self.paid(self.copy, self.episode, self.at))
        return self._see(), reward, over and self.episode % 2 == 0, over and self.episode % 2 == 1, {}

    @staticmethod
    def paid(copy: Any, episode: Any, at: Any) -> Any:
        """Return the reward of the step that led there."""
        return copy % 97 + 100 * (episode % 100) + 10_000 * (at % 100)


class NumberedForces(Numbered):
    """The same, pushed by a force."""

    action_space = gymnasium.spaces.Box(-1, 1, (1,))


class DiesInStep(Talker):
    """Kills its process in the middle of training."""

    def step(self, action: Any) -> Any:
        if self.steps == 100:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(action)


class DiesAtOnce(Talker):
    """Kills its process as soon as it is made in one of a worker."""

    def __init__(self) -> None:
        super().__init__()
        os.kill(os.getpid(), signal.SIGKILL)


class Grandchild(Talker):
    """Leaves a process of its own to itself."""

    def __init__(self) -> None:
        super().__init__()
        self.process = subprocess.Popen(["sleep", "1000"])


class Daemon(Talker):
    """Starts a process that leaves its session and its parent."""

    def __init__(self) -> None:
        super().__init__()
        subprocess.run(["sh", "-c", "setsid sleep 1000 &"], stdout=subprocess.DEVNULL)


class BareDaemon(Talker):
    """Starts a process that leaves its session and its parent, and has no variables; by
    its second argument a test finds it."""

    def __init__(self) -> None:
        super().__init__()
        number = int(os.environ["TIDEMILL_TEST_RUN"], 16)
        subprocess.run(["sh", "-c", f"env -i setsid sleep 1000 0.{number} &"], stdout=subprocess.DEVNULL)


class Daemons(Daemon, BareDaemon):
    """Starts both kinds of daemons, which are found by different marks."""


class Leaves(Grandchild, Daemons):
    """Starts all of them."""


class Speaks(Talker):
    """Prints in each step, onto a disk that is full, and letters that not every encoding
    has."""

    def __init__(self) -> None:
        super().__init__()
        full = os.open("/dev/full", os.O_WRONLY)
        for own in (1, 2):
            os.dup2(full, own)

    def step(self, action: Any) -> Any:
        print("… step", self.steps, flush=True)
        print("… step", self.steps, file=sys.stderr)
        return super().step(action)


class Starts(Talker):
    """Takes a while to make."""

    def __init__(self) -> None:
        time.sleep(0.5)
        super().__init__()


class StartsWhenTold(Talker):
    """Is made once there is a file `told`."""

    def __init__(self) -> None:
        until = time.monotonic() + 100
        while not Path("told").exists() and time.monotonic() < until:
            time.sleep(0.01)
        super().__init__()


class HangsAsItBegins(Talker):
    """Does not come to be made where there is a file `flag`.again: once, or `always`."""

    def __init__(self, flag: str, always: bool) -> None:
        super().__init__()
        if Path(flag).with_suffix(".again").exists():
            hold(Path(flag))
            while always:
                time.sleep(0.05)


def hold(flag: Path, begin: Callable[[], None] = lambda: None) -> None:
    """Write the name of this process's log into `flag`, where nobody has, and wait for
    `flag`.over."""
    with suppress(FileExistsError), flag.open("x") as file:
        file.write(Path(os.readlink("/proc/self/fd/1")).stem)
        file.flush()
        begin()
        while not flag.with_suffix(".over").exists():
            time.sleep(0.05)


class HangsOnce(Talker):
    """Does not come back from step 200 before there is a file `flag`.over, but when it
    has hung before."""

    def __init__(self, flag: str) -> None:
        super().__init__()
        self.flag = Path(flag)

    def step(self, action: Any) -> Any:
        if self.steps == 200 and not self.flag.exists():
            hold(self.flag, self.begin_to_hang)
        return super().step(action)

    def begin_to_hang(self) -> None:
        pass


class HangsInAThread(HangsOnce):
    """The same, in one of the threads of lanes. Its deadline is cut short, and it alone
    can be late for that: once all others are done with their step, until it is left."""

    def begin_to_hang(self) -> None:
        frame: Any = sys._getframe()
        while frame.f_code.co_name != "_do":
            frame = frame.f_back
        threads, times, owner = (frame.f_locals[name] for name in ("self", "times", "owner"))
        usual = times.given
        while len(threads._left) > 1:
            time.sleep(0.01)
        times.deadline = lambda resetting: 0.5 if owner else usual
        times.given = 0.5


class HangsInEvaluation(HangsOnce):
    """Hangs so in a step of an evaluation of the replay trainer's."""

    def step(self, action: Any) -> Any:
        if any(call.file.endswith("iteration_evaluation.py") for call in stack_of(threading.get_ident())):
            self.steps = 200
        return super().step(action)


class EndlessGame(Talker):
    """Its third game does not end. It says so, by a file in the working directory."""

    games = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.games += 1
        return super().reset(seed=seed)

    def step(self, action: Any) -> Any:
        seen, reward, over, cut, info = super().step(action)
        if self.games == 3:
            Path("evaluating").touch()
            time.sleep(0.01)
        return seen, reward, over and self.games < 3, cut, info


class SlowInEvaluation(Talker):
    """Takes a while for a step in an evaluation of the replay trainer's, and says so, by
    a file in the working directory."""

    def step(self, action: Any) -> Any:
        if any(call.file.endswith("iteration_evaluation.py") for call in stack_of(threading.get_ident())):
            Path("evaluating").touch()
            time.sleep(0.01)
        return super().step(action)


class Dawdles(Talker):
    def step(self, action: Any) -> Any:
        time.sleep(0.25)
        return super().step(action)


class Hoards(Talker):
    """Takes memory from step 200 on, until the system ends its process, and no other one;
    but where there is a file `hoarded`."""

    def step(self, action: Any) -> Any:
        if self.steps == 200 and not Path("hoarded").exists():
            Path("hoarded").touch()
            Path("/proc/self/oom_score_adj").write_text("1000")
            taken = [np.ones(1 << 22) for _ in range(1 << 7)]
            raise MemoryError(f"{len(taken)} pieces of 32 MB were to be had")
        return super().step(action)


class Hangs(Talker):
    """Never comes back from step 200."""

    def step(self, action: Any) -> Any:
        if self.steps == 200:
            Path("hanging").touch()
            while True:
                time.sleep(1000)
        return super().step(action)


class Dozes(Talker):
    """Takes a while."""

    def step(self, action: Any) -> Any:
        time.sleep(0.002)
        return super().step(action)


class HangsAtLast(Dozes):
    """No copy of it comes back from the step that is the 300th of all, or from any later
    one."""

    taken = 0

    def step(self, action: Any) -> Any:
        HangsAtLast.taken += 1
        if HangsAtLast.taken >= 300:
            Path("hanging").touch()
            while True:
                time.sleep(1000)
        return super().step(action)


class Snoozes(Talker):
    """Takes so many seconds for each step."""

    def __init__(self, seconds: float = 0.5) -> None:
        super().__init__()
        self.seconds = seconds

    def step(self, action: Any) -> Any:
        Path("snoozing").touch()
        time.sleep(self.seconds)
        return super().step(action)
