"""Rounds that close without waiting for everybody: each reply was computed from the version that its client fetched."""
