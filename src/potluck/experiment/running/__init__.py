"""Runs, one and several, from start or checkpoint to end."""
