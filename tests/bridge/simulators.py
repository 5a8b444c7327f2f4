"""Simulators for tests, in Python: `python simulators.py KIND --memory-path PATH`. Each
does on purpose what others do rarely."""

import importlib.util
import os
import subprocess
import sys
import time
import types

# the trainer's parts, which its own __init__ imports, are not needed here, and take
# longer than all the rest
package = types.ModuleType("tidemill")
package.__path__ = list(importlib.util.find_spec("tidemill").submodule_search_locations)
sys.modules["tidemill"] = package

from tidemill.bridge import Bridge, World  # noqa: E402
from tidemill.bridge.protocol.side_channels import Channels, EnvironmentParameters, Statistics  # noqa: E402
from tidemill.bridge.protocol.tables import QUERY, RESET, STEP  # noqa: E402

KIND = sys.argv[1]


class Simulator:
    """What they share. `tick` says what happens in exchange `t` (0: the first of all, and
    the first after each reset)."""

    def __init__(self):
        self.parameters, self.statistics = EnvironmentParameters(), Statistics()
        self.t = 0
        self.resets = 0
        self.bridge = Bridge(channels=Channels([self.parameters, self.statistics]), on_reset=self.reset)
        self.worlds()

    def reset(self):
        self.t = 0
        self.resets += 1

    def run(self):
        while True:
            self.tick(self.t)
            self.t += 1
            if not self.bridge.exchange():
                break
        self.bridge.close()

    def actions(self, world):
        return {
            event.agent_id: (event.continuous.tolist(), event.discrete.tolist()) for event in world.actions()
        }


class Episodes(Simulator):
    """A world in which agent a's k-th episode takes 2 + (a + k) % 3 steps and the next
    begins in the same exchange ("again"), or the one after ("after"). Observation:
    [agent, episode, row]; reward: 100 * agent + 10 * episode + row; every third episode
    is interrupted."""

    again = True
    agents = 3

    def worlds(self):
        self.world = self.bridge.add(
            World("group", self.agents * 2 if self.again else self.agents, [(3,)], continuous_size=1)
        )
        self.playing = {}

    def reset(self):
        super().reset()
        self.playing = {}

    def tick(self, t):
        for agent in range(self.agents):
            episode, row = self.playing.get(agent, (-1, -1))
            over = False
            if row >= 0:
                row += 1
                over = row == 2 + (agent + episode) % 3
                request = (
                    (self.world.interrupt_episode if episode % 3 == 2 else self.world.end_episode)
                    if over
                    else self.world.request_decision
                )
                request(agent).set_reward(100 * agent + 10 * episode + row).set_observation(
                    0, [agent, episode, row]
                )
            if row < 0 or (over and self.again):
                episode, row = episode + 1, 0
                self.world.request_decision(agent).set_observation(0, [agent, episode, row])
            elif over:
                row = -1
            self.playing[agent] = (episode, row)


class After(Episodes):
    again = False


class Alternating(Simulator):
    """Agent a of 3 asks in exchanges t with t % 2 == a % 2, is paid 1 in each, and lives
    for 7 exchanges."""

    def worlds(self):
        self.world = self.bridge.add(World("group", 3, [(1,)], branches=(2,)))

    def tick(self, t):
        for agent in range(3):
            if t % 7 == 6:
                if t % 2 == agent % 2 or t > 6:
                    self.world.end_episode(agent).set_reward(1).set_observation(0, [t])
            elif t % 2 == agent % 2:
                self.world.request_decision(agent).set_reward(1).set_observation(0, [t])


class Rich(Simulator):
    """Several observations (one a picture), two branches with masks; tells back what was
    done."""

    def worlds(self):
        self.world = self.bridge.add(World("rich", 2, [(2,), (2, 3, 1)], branches=(3, 2)))

    def tick(self, t):
        done = self.actions(self.world)
        for agent in range(2):
            request = (
                self.world.request_decision(agent)
                .set_observation(0, [agent, t])
                .set_observation(1, [agent * 10 + i for i in range(6)])
            )
            request.set_action_mask(0, [False, agent == 0, True]).set_action_mask(1, [t % 2 == 1, False])
            if agent in done:
                first, second = done[agent][1]
                request.set_reward(10 * first + second)


class Hybrid(Simulator):
    """Continuous and discrete actions at once; the reward is their sum."""

    def worlds(self):
        self.world = self.bridge.add(World("hybrid", 1, [(1,)], continuous_size=2, branches=(4,)))

    def tick(self, t):
        done = self.actions(self.world).get(0)
        self.world.request_decision(0).set_observation(0, [t]).set_reward(
            sum(done[0]) + sum(done[1]) if done else 0
        )


class Late(Simulator):
    """A second group appears in exchange 5."""

    def worlds(self):
        self.early, self.late = self.bridge.add(World("early", 1, [(1,)], continuous_size=1)), None

    def tick(self, t):
        self.early.request_decision(0).set_observation(0, [t])
        if t == 5 and self.late is None:
            self.late = self.bridge.add(World("late", 2, [(2,)], branches=(2,)))
        if self.late is not None:
            self.late.request_decision(7).set_observation(0, [t, 1])


class Slow(Simulator):
    """Groups appear only after the third exchange; agents after some more, also after a
    reset."""

    def worlds(self):
        self.world, self.first = None, self.bridge.add(World("other", 1, [(1,)], continuous_size=1))

    def tick(self, t):
        if t < 4:
            self.first.end_episode(0).set_observation(0, [0])
        else:
            self.first.request_decision(0).set_observation(0, [t])


class Crowd(Simulator):
    """Never ends an episode of agents that it takes away."""

    def worlds(self):
        self.world = self.bridge.add(World("group", 2, [(1,)], continuous_size=1))

    def tick(self, t):
        for agent in (t, t + 1):
            self.world.request_decision(agent).set_observation(0, [t])


class Mortal(Simulator):
    """Dies in exchange 12 with a message, in every life; tells its seed and
    parameters."""

    def worlds(self):
        self.world = self.bridge.add(World("group", 1, [(3,)], continuous_size=1))

    def tick(self, t):
        seen = [t, self.parameters.get("seed", -1), self.parameters.get("level", -1)]
        if t == 12:
            print("the sky fell", flush=True)
            sys.exit(3)
        over = t % 5 == 4
        (self.world.end_episode if over else self.world.request_decision)(0).set_reward(t).set_observation(
            0, seen
        )
        self.statistics.add("t", t, "most_recent")
        self.statistics.add("exchanges", 1, "sum")


class Cutting(Mortal):
    """Cuts the memory short in exchange 5, while the trainer waits."""

    def tick(self, t):
        super().tick(t)
        if t == 5:
            os.truncate(self.bridge._memory.path, 0)
            time.sleep(60)


class Napping(Simulator):
    """Takes 0.05 s for an exchange."""

    def worlds(self):
        self.world = self.bridge.add(World("group", 1, [(1,)], continuous_size=1))

    def tick(self, t):
        if t:
            time.sleep(0.05)
        self.world.request_decision(0).set_observation(0, [t])


class Gated(Simulator):
    """Takes as long for an exchange as there is no file of the name that it is given."""

    def worlds(self):
        self.world = self.bridge.add(World("group", 1, [(1,)], continuous_size=1))

    def tick(self, t):
        while not os.path.exists(sys.argv[2]):
            time.sleep(0.002)
        self.world.request_decision(0).set_observation(0, [t])


class Meeting(Simulator):
    """Answers once so many simulators are at the same exchange; what each has begun it
    tells by files in a folder: `meeting FOLDER HOW_MANY NUMBER`."""

    def worlds(self):
        self.world = self.bridge.add(World("group", 1, [(1,)], continuous_size=1))

    def tick(self, t):
        folder, many, number = sys.argv[2:5]
        met = f"{self.resets}-{t}-"
        open(os.path.join(folder, met + number), "w").close()
        while sum(name.startswith(met) for name in os.listdir(folder)) < int(many):
            time.sleep(0.002)
        self.world.request_decision(0).set_observation(0, [t])


class Deaf(Simulator):
    """Hangs in exchange 3, and hears nothing any more."""

    def worlds(self):
        self.world = self.bridge.add(World("group", 1, [(1,)], continuous_size=1))

    def tick(self, t):
        if t == 3:
            time.sleep(600)
        self.world.request_decision(0).set_observation(0, [t])


class Lingering(Simulator):
    """Closes the bridge in exchange 3, and goes on for long."""

    def worlds(self):
        self.world = self.bridge.add(World("group", 1, [(1,)], continuous_size=1))

    def tick(self, t):
        if t == 3:
            self.bridge.close()
            time.sleep(600)
        self.world.request_decision(0).set_observation(0, [t])


class Outlived(Lingering):
    """Dies in exchange 3; something that it started holds its output."""

    def tick(self, t):
        if t == 3:
            subprocess.Popen(["sleep", "600"])
            os._exit(3)
        super().tick(t)


class NotANumber(Simulator):
    """An observation is NaN in exchange 3; where a file is named, in the first one of a
    reset that finds it there instead, and that removes it."""

    def worlds(self):
        self.world = self.bridge.add(World("group", 1, [(1,)], continuous_size=1))

    def tick(self, t):
        blind = t == 3
        if not sys.argv[2].startswith("-"):
            blind = t == 0 and os.path.exists(sys.argv[2])
        if blind and t == 0:
            os.unlink(sys.argv[2])
        self.world.request_decision(0).set_observation(0, [float("nan") if blind else t])


class Single(Simulator):
    """One agent, whose episodes have four steps. Observation: [row + parameter `first`,
    seed]; the reward is made of its action."""

    def worlds(self):
        self.world = self.bridge.add(World("single", 1, [(2,)], branches=(3, 2)))
        self.row = None

    def reset(self):
        super().reset()
        self.row = None

    def tick(self, t):
        self.row = None if self.row == 4 else self.row
        done = self.actions(self.world).get(0)
        self.row = 0 if self.row is None else self.row + 1
        request = (self.world.end_episode if self.row == 4 else self.world.request_decision)(0)
        request.set_observation(
            0, [self.row + self.parameters.get("first", 0), self.parameters.get("seed", 0)]
        )
        request.set_reward(10 * done[1][0] + done[1][1] if done else 0)
        if self.row < 4:
            request.set_action_mask(0, [False, False, True])


class One(Simulator):
    """One agent with a continuous action, whose episodes have three rows; the next begins
    in a later exchange than the one that ends one."""

    def worlds(self):
        self.world = self.bridge.add(World("one", 1, [(1,)], continuous_size=1))

    def tick(self, t):
        (self.world.end_episode if t % 3 == 2 else self.world.request_decision)(0).set_reward(
            1
        ).set_observation(0, [t % 3])


class Telling(One):
    """Tells a score in every exchange, twice: 10 times its number, and 2 more."""

    def tick(self, t):
        super().tick(t)
        self.statistics.add("score", 10 * t)
        self.statistics.add("score", 10 * t + 2)


class Statistical(Simulator):
    """Sends a statistic with every exchange."""

    def worlds(self):
        self.world = self.bridge.add(World("group", 1, [(1,)], continuous_size=1))

    def tick(self, t):
        self.world.request_decision(0).set_observation(0, [t])
        self.statistics.add("t", t)


class Stepping(Statistical):
    """Takes a query for a step."""

    def worlds(self):
        super().worlds()
        memory = self.bridge._memory
        receive = memory.receive
        memory.receive = lambda *given: self.queried(receive(*given))

    def queried(self, command):
        return STEP if command == QUERY else command


class Forgetful(Stepping):
    """Leaves the flag of a reset as it was."""

    def queried(self, command):
        memory = self.bridge._memory
        if command == RESET:
            memory._first[memory._at["reset"]] = 1
        elif self.t == 0:
            memory._first[memory._at["reset"]] = 0
        return command


class Frozen(Stepping):
    """Never comes back from a query. The file that the environment variable HUNG names is
    there once it hangs."""

    def queried(self, command):
        if command == QUERY:
            if "HUNG" in os.environ:
                open(os.environ["HUNG"], "w").close()
            time.sleep(1000)
        return command


class Twofold(Statistical):
    """Makes a body for its group and another for its side channel."""

    def worlds(self):
        super().worlds()
        memory = self.bridge._memory
        put = memory.put
        memory.put = lambda data, new=(): (put(b"", new), put(bytes(200) if new else data))


class Two(Simulator):
    """Six agents in one group and one in the other; episodes of three rows in both. The
    reward of each row is 1 or 2."""

    def worlds(self):
        self.many = self.bridge.add(World("many", 6, [(1,)], continuous_size=1))
        self.one = self.bridge.add(World("one", 1, [(2,)], branches=(2,)))

    def tick(self, t):
        for world, agents in ((self.many, 6), (self.one, 1)):
            for agent in range(agents):
                (world.end_episode if t % 3 == 2 else world.request_decision)(agent).set_reward(
                    1 if world is self.many else 2
                )


class Three(Simulator):
    """Three groups that are new in one turn, with side-channel data for which there is no
    room; closes after 3 exchanges."""

    def worlds(self):
        self.three = [self.bridge.add(World(name, 1, [(1,)], continuous_size=1)) for name in ("a", "b", "c")]

    def tick(self, t):
        if t == 3:
            self.bridge.close()
            sys.exit()
        self.statistics.add("a name of some length, so that there is no room", t)
        for world in self.three:
            world.request_decision(0).set_reward(t)


class Again(Simulator):
    """Five agents ask; from then on all of them end their episode and ask in the same
    exchange."""

    def worlds(self):
        self.world = self.bridge.add(World("again", 5, [(4,)], continuous_size=2))

    def tick(self, t):
        if t:
            for agent in range(5):
                self.world.end_episode(agent).set_reward(agent)
        for agent in range(5):
            self.world.request_decision(agent).set_reward(10 + agent)


class Born(Simulator):
    """Agents are made by a reset only."""

    def worlds(self):
        self.world = self.bridge.add(World("group", 2, [(1,)], continuous_size=1))

    def tick(self, t):
        for agent in range(2 if self.resets else 0):
            self.world.request_decision(agent).set_observation(0, [self.resets])


class Blind(Simulator):
    """Agents that see nothing."""

    def worlds(self):
        self.world = self.bridge.add(World("group", 1, [], continuous_size=1))

    def tick(self, t):
        self.world.request_decision(0)


class Twice(Simulator):
    """An agent that ends two episodes in one exchange."""

    def worlds(self):
        self.world = self.bridge.add(World("group", 3, [(1,)], continuous_size=1))

    def tick(self, t):
        for _ in range(2 if t == 3 else 0):
            self.world.end_episode(7)
        self.world.request_decision(7)


if __name__ == "__main__":
    kinds = {
        kind.__name__.lower(): kind
        for kind in (
            *(
                Episodes,
                After,
                Alternating,
                Rich,
                Hybrid,
                Late,
                Slow,
                Crowd,
                Mortal,
                Napping,
                Gated,
                Meeting,
                Deaf,
                Lingering,
                Outlived,
                NotANumber,
                Single,
                Two,
                Blind,
                Born,
                Twice,
            ),
            *(Statistical, Stepping, Forgetful, Frozen, Twofold, Three, One, Again, Cutting, Telling),
        )
    }
    kinds[KIND]().run()
