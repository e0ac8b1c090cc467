"""Everything between a client's answer and the method that asked: checks, events, counts."""
