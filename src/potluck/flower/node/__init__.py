"""The node's side: its service, its models and data, and what it permits."""
