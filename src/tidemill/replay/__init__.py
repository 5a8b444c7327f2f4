"""Family of buffers between a sample stream and a trainer: one file per member."""
