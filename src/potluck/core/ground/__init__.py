"""What everything stands on: errors, draws, text, files, and trees of settings."""
