"""A client's half of an exchange: its runtime, the session of one call, local training."""
