"""A metric sink of one's own: each record is a line of a text file.

tidemill train CartPole-v1 --log examples/own_sink.py:Returns,tensorboard
"""

from tidemill import MetricSink


class Returns(MetricSink):
    """Writes the mean return at each env step."""

    title = "returns.txt"

    def write(self, record):
        if "return/mean" in record:
            with open(self.run.folder / "returns.txt", "a") as file:
                print(f"{record['step']:,.0f}: {record['return/mean']:.1f}", file=file)
