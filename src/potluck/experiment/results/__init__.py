"""What a run has found."""
