"""What needs a GPU: captured steps, streams, kernels. `engine.choose` alone imports it, late."""
