"""Networks as every method handles them: weights, slices, sizes, modes, statistics."""
