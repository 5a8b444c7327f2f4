"""Training from Python: from an environment or an experiment to what was trained."""
