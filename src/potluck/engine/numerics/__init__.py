"""How numbers are computed: precision, memory layout, kernels, what they cost."""
