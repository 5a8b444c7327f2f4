"""A policy worker that answers late, out of order, twice, and now and then never: run by
test_fuzz.py as a process of its own.

Arguments: a seed, its bell, the clients' bell, and for each client the memory of requests
and that of answers. Ends with standard input, and prints how many requests were answered
late, twice, and never.
"""

import random
import select
import sys

from tests.streams.echo import ANSWER, OBSERVATION, STATE, echo, receiving, sending

from tidemill.api.stream import Requests
from tidemill.streams.inference import ChannelInferenceServer
from tidemill.transports.shared import EventBell


def main() -> None:
    seed, own, theirs, *memory = map(int, sys.argv[1:])
    bell = EventBell(own)
    bell.also(sys.stdin.fileno())
    channels = [
        (receiving(asked, theirs), sending(answered, theirs))
        for asked, answered in zip(memory[::2], memory[1::2], strict=True)
    ]
    server = ChannelInferenceServer(channels, OBSERVATION, STATE, ANSWER)
    dice = random.Random(seed)
    kept: list[Requests] = []
    last = [0] * len(channels)  # the number that was answered before
    late = twice = lost = 0
    while not select.select([sys.stdin], [], [], 0)[0]:
        fresh = server.poll_requests(dice.randint(1, 12))
        kept += fresh
        dice.shuffle(kept)
        answered = 0
        while kept and dice.random() < 0.7:
            one = kept.pop()
            late += one not in fresh
            answers, fate, answered = echo([one]), dice.random(), answered + 1
            room = channels[one.client][1].free() - (server._taken[one.client] - server._answered[one.client])
            if fate < 0.03:  # lost: its slot goes back with an answer to what was answered long ago
                one.number, answers = (
                    last[one.client],
                    {name: array * 0 - 7 for name, array in answers.items()},
                )
                lost += 1
            server.respond([one], answers, seed, 0)
            if 0.1 < fate < 0.2 and room > 0:
                server.respond([one], {name: array * 0 - 9 for name, array in answers.items()}, seed, 0)
                twice += 1
            last[one.client] = one.number
        if not fresh and not answered:
            bell.wait(0.002)
    print(late, twice, lost)


main()
