"""The CUDA backend in Triton: kernels and their launchers. They also run in Triton's interpreter, on the CPU, for tests."""
