"""The trainer's end of the bridge: simulators as environments."""
