"""Tools for authors of simulators: conformance checks, recordings, a look into memory."""
