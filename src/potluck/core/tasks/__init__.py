"""What outputs are for: a loss, and the sums from which metrics follow."""
