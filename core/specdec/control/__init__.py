"""What the host learns from finished rounds and decides before the next: survival and calibration. Torch-free."""
