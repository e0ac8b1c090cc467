"""Secure sums: a server learns what its clients' tensors add up to, block by block, and no client's own.

The protocol alone, over bytes; no run uses it yet.
"""
