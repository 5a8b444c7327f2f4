"""Every contract, in a few short files: read these and you know the system."""
