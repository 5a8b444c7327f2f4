"""The simulator bridge: engines in any language join over shared memory (docs/simulators.md)."""
