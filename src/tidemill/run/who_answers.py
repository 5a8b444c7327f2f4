"""Who answers whom in a run: at first as its edges are laid, later also whoever takes
over from a policy worker that has no life left."""

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import replace

from tidemill.api.control_messages import AnsweredBy
from tidemill.api.edges import inference_edges
from tidemill.api.experiment import Experiment

_Asked = tuple[str, str, str]
"""Stream, asker and policy."""


class WhoAnswers:
    """Who answers what is asked on a run's inference streams.

    edges: those of the experiment, as they are used now: each of an inference stream
        leads to who answers
    """

    def __init__(self, experiment: Experiment) -> None:
        self.edges = experiment.edges()
        self._able: dict[_Asked, list[str]] = {}  # who can answer, the one that does so at first in front
        for edge in (*self.edges, *experiment.spare_edges()):
            kind, *names = edge.name.split("/")
            if kind in ("requests", "spare-requests"):
                stream, asker, policy = names[:3]
                self._able.setdefault((stream, asker, policy), []).append(edge.targets[0])
        self._servers = {asked: able[0] for asked, able in self._able.items()}
        self._moved: dict[_Asked, AnsweredBy] = {}  # of what is answered by another one than at first

    def answers(self, worker: str) -> bool:
        """True of who answers anybody now."""
        return worker in self._servers.values()

    def heirs(self, dead: Collection[str], gone: Collection[str]) -> list[AnsweredBy]:
        """Return who is to answer what `dead` workers answer now, of those who are not
        `gone` for good; of several who has the fewest askers. [] where for anything that
        they are asked there is nobody, or they are asked nothing."""
        load, found = Counter(self._servers.values()), list[AnsweredBy]()
        for asked, server in self._servers.items():
            if server not in dead:
                continue
            able = [other for other in self._able[asked] if other not in dead and other not in gone]
            if not able:
                return []
            heir = min(able, key=load.__getitem__)
            load[heir] += 1
            found.append(AnsweredBy(*asked, heir))
        return found

    def move(self, heirs: Iterable[AnsweredBy]) -> None:
        """Have these answer from now on."""
        for order in heirs:
            asked = order.stream, order.asker, order.policy
            self._servers[asked], self._moved[asked] = order.server, order
            requests, answers = inference_edges(*asked)
            self.edges = [
                replace(edge, targets=(order.server,))
                if edge.name == requests
                else replace(edge, source=order.server)
                if edge.name == answers
                else edge
                for edge in self.edges
            ]

    def orders(self, worker: str) -> list[AnsweredBy]:
        """Return what a worker's next life must be told of all that has moved."""
        return [order for order in self._moved.values() if worker in (order.asker, order.server)]
