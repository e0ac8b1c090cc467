"""The vocabulary: methods, roles, messages, local training, weights, randomness. Imports torch, nothing of Potluck."""
