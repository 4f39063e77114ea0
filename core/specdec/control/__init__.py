"""What the host learns from finished rounds and decides before the next: survival, calibration, admission. Torch-free."""
