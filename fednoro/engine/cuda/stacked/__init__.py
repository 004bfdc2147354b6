"""Many clients trained as one network on a GPU, and its kernels."""
