"""Data sets, how they are divided among clients, and how images are prepared."""
