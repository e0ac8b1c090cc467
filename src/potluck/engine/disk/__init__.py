"""What outlives a process, written so that none is lost."""
