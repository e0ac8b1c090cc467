"""Experiments: from a configuration to a folder of records that can be trusted, interrupted and resumed."""
