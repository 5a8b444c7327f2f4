"""Algorithms: what learns. A file each, with the configuration and the learner that it
builds; what several share (`policy_gradient` and its loss, `minibatches`, `adam`) and the
formulas of all. Importing them imports no torch."""
