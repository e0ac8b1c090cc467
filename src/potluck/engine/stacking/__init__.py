"""Several clients' networks trained as one computation."""
