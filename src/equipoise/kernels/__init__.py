"""CPU kernels: C sources and their PyTorch operators."""
