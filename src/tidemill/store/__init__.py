"""What lies on disk: checkpoints, and the parameter database with its queries."""
