"""The workers: actor, policy, trainer and what they share. They know no named algorithm,
launcher or transport."""
