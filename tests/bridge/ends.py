"""Both ends of a bridge in one process: a world in a thread of its own, and its
trainer."""

import contextlib
import threading

import numpy as np
from tests.run.watching import wait_until

from tidemill.bridge import Bridge, Simulator, World


class Counting:
    """A simulator of one world, "count", whose observation is [agent, tick] and whose
    reward is the sum of the action that it got before.

    agents: how many there are
    plan: called before each exchange with (tick, bridge, worlds by name): adds worlds,
        makes requests. None: every agent asks, every tick
    """

    def __init__(self, path, agents=3, branches=(), continuous=2, plan=None, channels=None):
        self.agents, self.plan, self.error, self.resets, self.got = agents, plan, None, 0, []
        self._arguments = path, branches, continuous, channels
        self.thread = threading.Thread(target=self._run, daemon=True)

    def _run(self):
        path, branches, continuous, channels = self._arguments
        try:
            wait_until(path.exists, 120, "the trainer has made the file")
            self.bridge = bridge = Bridge(path, channels=channels, on_reset=self._reset)
            world = bridge.add(World("count", self.agents, [(2,)], continuous, branches))
            self.rewards = np.zeros(self.agents)
            self.tick = 0
            while True:
                if self.plan is None:
                    for agent in range(self.agents):
                        world.request_decision(agent).set_observation(0, [agent, self.tick]).set_reward(
                            self.rewards[agent]
                        )
                else:
                    self.plan(self.tick, bridge, world)
                self.tick += 1
                if not bridge.exchange():
                    return
                for event in world.actions():
                    self.got.append((event.agent_id, event.continuous.tolist(), event.discrete.tolist()))
                    if self.plan is None:
                        self.rewards[event.agent_id] = event.continuous.sum() + event.discrete.sum()
        except Exception as error:
            self.error = error
            with contextlib.suppress(Exception):
                self.bridge.close()

    def _reset(self):
        self.resets += 1
        self.tick = 0
        self.rewards[:] = 0


@contextlib.contextmanager
def both_ends(folder, layout="0", trainer_channels=None, deadline=120.0, **world):
    """Give (simulator, world's thread)."""
    path = folder / "memory"
    ours = Counting(path, **world)
    ours.thread.start()
    with Simulator(
        memory_path=path, layout=layout, channels=trainer_channels, start_seconds=120.0, deadline_s=deadline
    ) as simulator:
        yield simulator, ours
    ours.thread.join(120)
    assert not ours.thread.is_alive()
