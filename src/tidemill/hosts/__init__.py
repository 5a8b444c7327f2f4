"""What joins the hosts of a run: channels and cells whose two ends are on different
ones."""
