"""The vocabulary: methods, roles, messages, local training, weights, randomness. Imports torch and nothing above it."""
