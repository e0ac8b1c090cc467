"""Plots of stored runs. Matplotlib is imported inside the functions that draw."""
