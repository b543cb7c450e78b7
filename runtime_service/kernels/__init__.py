"""Device kernels, each beside a naive twin that says what it must do. Only this folder imports triton."""
