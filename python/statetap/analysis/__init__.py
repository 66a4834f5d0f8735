"""What is computed from captured states: a place for effective attention, patching, norms and plots."""
