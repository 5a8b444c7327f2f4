"""Example worlds in Python: `python -m tidemill.bridge.worlds.reach`, and `corridor`. The
same ones come in C (bridge/native) and in C# (bridge/csharp).
"""
