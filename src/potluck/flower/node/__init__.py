"""A node's side: its service, its models and data, what it permits."""
