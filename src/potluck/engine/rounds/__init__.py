"""Rounds: the engine, and what a round is made of."""
