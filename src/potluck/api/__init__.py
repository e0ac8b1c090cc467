"""Potluck in a script or a notebook: run, open, compare and export from Python, as the command line does."""
