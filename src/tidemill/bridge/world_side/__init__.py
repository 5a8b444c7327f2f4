"""The simulator's end of the bridge in Python, and the sources of those in C and C#."""
