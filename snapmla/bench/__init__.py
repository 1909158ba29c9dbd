"""Timing decode kernels on a GPU: what is called, on which inputs, by which clock, and on what machine."""
