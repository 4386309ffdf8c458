"""Run exported networks with numpy and the library of C kernels, without torch."""
