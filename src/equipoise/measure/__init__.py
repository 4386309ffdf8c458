"""What happens inside: costs, gradients, and the bounds of the theory."""
