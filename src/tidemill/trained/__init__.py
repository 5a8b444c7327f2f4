"""Runs that have trained: load, evaluate, play and plot them, or train them again."""
