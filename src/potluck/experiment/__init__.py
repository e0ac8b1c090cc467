"""Experiments: from a configuration to a run's folder, which can be interrupted, resumed and checked."""
