"""How a sparse weight is stored: masked or packed."""
