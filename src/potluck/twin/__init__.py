"""The twin: a virtual clock beside a run, by which clients' devices take their time, leave and come back."""
