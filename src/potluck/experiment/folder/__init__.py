"""A run's folder: what is in it, and what can be made of it."""
