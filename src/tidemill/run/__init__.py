"""Runs: start, watch, save and stop an experiment; what a run folder holds."""
