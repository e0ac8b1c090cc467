"""What clients and server ask the engine to compute, and the examples it computes on."""
