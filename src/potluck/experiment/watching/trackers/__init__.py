"""Trackers: each round's numbers also go to TensorBoard, MLflow, Weights & Biases or trackio.

A tracker is an observer of the run that keeps no number of its own: what it is sent is in the run's folder too.
"""
