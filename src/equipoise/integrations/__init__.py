"""Sparse training inside other frameworks: `lightning` (PyTorch Lightning) and `transformers` (Hugging Face)."""
