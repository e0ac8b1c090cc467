"""Engines run methods: they interpret `cohort.ask` and `yield Fit`, and know nothing of any method."""
