"""Triton kernels of the GPU path; each has a plain PyTorch reference in its test.

Written for Triton 3.6 to 3.9. With TRITON_INTERPRET=1 they run on the CPU, slowly: that is how
the tests check them where there is no GPU.
"""
