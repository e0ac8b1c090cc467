"""Secure sums: a server learns what its clients' tensors add up to, block by block, and no client's own.

The protocol alone, over bytes; `potluck.experiment.running.secure_sums` carries it out in a run on one machine.
"""
