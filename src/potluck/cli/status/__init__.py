"""The operator's page: how a served run and each of its nodes stand, for a browser and for Prometheus."""
