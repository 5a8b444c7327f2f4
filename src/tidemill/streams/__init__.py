"""Family of streams: inference, sample and parameter streams, written once over the three
primitives."""
