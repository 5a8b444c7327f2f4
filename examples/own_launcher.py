"""A launcher of one's own: every worker's process begins with another command, here
`nice`, so that training leaves the machine to others. `taskset` and `numactl` go the same
way.

tidemill train CartPole-v1 --launch examples/own_launcher.py:Nice
"""

from tidemill import ProcessesLauncher


class Nice(ProcessesLauncher):
    """Starts workers at the lowest priority."""

    def command(self, workers):
        return ["nice", "-n", "19", *super().command(workers)]
