"""From the name of an environment to an experiment that trains on it."""
