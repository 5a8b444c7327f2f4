"""What a worker process is told when it begins, as the message that it gets: see
`processes` and `entry`."""

from collections.abc import Sequence

import msgspec

from tidemill.api.transport import Handle


class WorkerEnds(msgspec.Struct, frozen=True):
    """One worker of a process: its control link, and how it reaches its edges."""

    worker: str
    link: int
    edges: dict[str, Handle]


class ProcessSetup(msgspec.Struct, frozen=True):
    """The order of a worker process."""

    ends: list[WorkerEnds]
    transport: str  # by its name
    experiment: str  # JSON
    source: str | None
    folder: str | None
    epoch: int  # of the folder
    resume: str | None
    spin: float
    math_threads: int
    layer_threads: int
    core: int | None  # the one that it keeps to
    files: dict[str, str]  # digests, by path
    bell: int
    asked: int  # eventfd by which it is asked where its workers' thread is
    stacks: int  # memfd that it writes down where its threads are in
    path: list[str]  # where the main process looks for modules
    life: int  # of its workers
    gpus: dict[str, int]  # see `Job`
    places: dict[str, str]  # see `Job`, of those that its workers sum with
    mark: str  # of what their environments start

    def descriptors(self) -> list[int]:
        """Return all that it names, each once."""
        handles = [handle for end in self.ends for handle in end.edges.values()]
        links = (end.link for end in self.ends)
        return list(
            dict.fromkeys(
                [
                    *(self.bell, self.asked, self.stacks),
                    *links,
                    *(d for handle in handles for d in handle.descriptors),
                ]
            )
        )

    def received(self, copies: Sequence[int]) -> "ProcessSetup":
        """Return what holds in a process that has `copies` of its descriptors."""
        own = dict(zip(self.descriptors(), copies, strict=True))
        ends = [
            WorkerEnds(
                end.worker,
                own[end.link],
                {
                    edge: msgspec.structs.replace(
                        handle, descriptors=tuple(own[d] for d in handle.descriptors)
                    )
                    for edge, handle in end.edges.items()
                },
            )
            for end in self.ends
        ]
        return msgspec.structs.replace(
            self, ends=ends, bell=own[self.bell], asked=own[self.asked], stacks=own[self.stacks]
        )
