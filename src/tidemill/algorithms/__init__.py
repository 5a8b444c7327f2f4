"""Algorithms: what learns. A configuration per file that imports no torch, its learner
beside it, and the formulas of all."""
