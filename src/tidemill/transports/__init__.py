"""Family of transports: each implements Channel, Cell and Bell over one kind of memory or
wire."""
