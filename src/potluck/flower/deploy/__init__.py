"""Deployment: Flower's processes, keys, and the gate."""
