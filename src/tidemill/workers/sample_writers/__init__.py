"""Sample writers: what a sample is (`AgentSpec.mode`), and when it leaves. A new mode is
a file here and a line in `WRITERS`."""

from tidemill.workers.sample_writers.after_done import AfterDone
from tidemill.workers.sample_writers.base import SampleWriter
from tidemill.workers.sample_writers.concise import Concise
from tidemill.workers.sample_writers.fixed import AlignedBlock
from tidemill.workers.sample_writers.full import Full

WRITERS: dict[str, type[SampleWriter]] = {
    "fixed": AlignedBlock,
    "after_done": AfterDone,
    "full": Full,
    "concise": Concise,
}
