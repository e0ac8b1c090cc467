"""Secure sums: a server learns what its clients' tensors add up to, block by block, and no client's own.

The protocol alone, over bytes; `potluck.experiment.running.secure_sums` carries it out in a run.
"""

ANSWERS = ("keys", "boxes", "words", "signature", "shares")
"""What clients answer at each step, see `potluck.secure.steps`."""
