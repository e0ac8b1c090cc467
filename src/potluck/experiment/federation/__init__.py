"""A federation made from settings, and whether a method can work in it."""
