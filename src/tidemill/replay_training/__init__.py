"""Replay training: actors that send every step by itself, and a trainer that keeps these
in a memory and trains on them so many times for each."""
