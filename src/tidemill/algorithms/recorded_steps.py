"""Steps of an update as a GPU has recorded them: see `tidemill.nets.recording`."""

from collections.abc import Callable

from torch import Tensor

from tidemill.nets.recording import GraphRecorder, GraphRecording

Step = Callable[[Tensor], Tensor]
"""pieces [n] → what was measured. It reads nothing of the device and leaves nothing but
what it writes there, where it lies each time."""


class RecordedSteps:
    """Recorded steps are done together, in the stream in which this is made, which must
    not be the default one."""

    def __init__(self) -> None:
        self._recorder: GraphRecorder | None = GraphRecorder()

    def of(self, step: Step) -> Step:
        """Return what does `step`: with the first pieces of each number as it is, and
        then as it was recorded. What it returns is rewritten by the next call. Steps that
        cannot be recorded, since they wait for the device, are done as they are, all of
        them from then on."""
        seen, recordings = set[int](), dict[int, tuple[Tensor, GraphRecording]]()

        def do(pieces: Tensor) -> Tensor:
            count = len(pieces)
            if count not in seen or self._recorder is None:
                seen.add(count)
                return step(pieces)
            if count not in recordings:
                given = pieces.clone()
                try:
                    recordings[count] = given, self._recorder.record(lambda: step(given))
                except RuntimeError:  # what is wrong with the step itself is raised by doing it
                    self._recorder = None
                    return step(pieces)
            given, recording = recordings[count]
            given.copy_(pieces)
            recording.graph.replay()
            assert recording.made is not None
            return recording.made

        return do
