"""Clients that lie: attacks as named parts of a run, against which a robust rule is tried."""
