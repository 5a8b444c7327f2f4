"""Tests of environments: conformance checks, and environments whose numbers are known."""
