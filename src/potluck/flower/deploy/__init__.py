"""Processes, keys and the gate between machines."""
