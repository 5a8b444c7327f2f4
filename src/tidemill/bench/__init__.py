"""How fast an experiment runs, how fast this machine could run it, and what holds it
back."""
