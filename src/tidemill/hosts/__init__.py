"""What joins the hosts of a run: channels and cells whose two ends are on different
ones."""

from tidemill.core.errors import needing

with needing("several hosts need", 'pip install "tidemill[hosts]"'):
    import zmq as _zmq  # noqa: F401
