"""The version, which the package's metadata, saved models and the command line say."""

__version__ = "0.1.0"
