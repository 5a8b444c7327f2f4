"""Family of launchers: where the workers of an experiment run."""
