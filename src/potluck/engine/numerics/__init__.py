"""Numerics: device, precision, memory layout, and estimates of cost."""
