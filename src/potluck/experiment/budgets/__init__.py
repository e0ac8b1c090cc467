"""Budgets of clients' devices: read from a table, compared with what candidates really take, watched in a run."""
