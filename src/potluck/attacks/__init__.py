"""Attacks on what a run sends: the mathematics, on arrays and networks; `potluck.api.attack` carries them out."""
